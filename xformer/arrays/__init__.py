"""Array types that give the library's code another meaning, forward and backward.

Ops, layers, models and optimisers call only functions of the array API, so an array type decides
what they compute:

- `dual`: dual numbers, for exact derivatives in a direction
- `digits`: numbers of many digits
- `rounding`: arrays that round every result to a number format of `formats`
- `onnx`: arrays that record a graph
"""
