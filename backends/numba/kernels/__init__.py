"""Kernels of ops for arrays of programs (`Traced`): a file for each op, and `activations`.

A kernel records an instruction with a native kernel, a compiled function of
(args, piece, pieces, memory) that computes one piece (`program/native.py`). Most are `declared` by
their arrays (`program/declared.py`). The docstring of another one lists:

outputs, inputs    arrays; their addresses are the first words of `args`, in this order
integers           the next words of `args` (`Native.numbers`); floats are stored as `bits`

In its code `a` holds the words of `args`, and `ptr` holds the addresses if `a` holds the integers
alone. Strides are in bytes. Sizes: N rows, D width; otherwise as in the op's docstring.
"""

from xformer.backends.numba.kernels import activations  # noqa: F401  the others are found by name
