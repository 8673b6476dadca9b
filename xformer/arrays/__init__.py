"""Array types that give the library's code another meaning, forward and backward.

Ops, layers, models and optimisers call only functions of the array API, so an array type decides
what they compute. `dual` has dual numbers, for exact derivatives in a direction. `onnx` has arrays
that record a graph.
"""
