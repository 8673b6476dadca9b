"""Kernels of ops for arrays of programs (`Traced`). Each op has a file.

A kernel records an instruction with a native kernel, a compiled function of
(args, piece, pieces, memory) that computes one piece (`program/native.py`). Its docstring lists:

outputs, inputs    arrays; their addresses are the first words of `args`, in this order
integers           the next words of `args` (`Native.numbers`); floats are stored as `bits`

In the code `a` holds the words of `args`, and `ptr` holds the addresses if `a` holds the integers
alone. Strides are in bytes. Sizes: N rows, D width; otherwise as in the op's docstring.
"""
