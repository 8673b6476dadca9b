"""Programs: record the operations of a function once, and run them without Python.

compiled.py     compile functions of trees of arrays: one program for each kind of arguments
run.py          record a function of arrays, and run it
traced.py       arrays without values, with which the function is called to record it
copies.py       copies, casts and reshaped views of these arrays
namespace.py    the array API on these arrays; kernels of ops are in `backends/numba/kernels`
operators.py    operators of these arrays
elementwise.py, typed.py, reduce.py, indexed.py   kernels of functions of the array API
formulas.py     formulas of elementwise functions, and loops that compute them
strided.py      loops over strided arrays for these kernels
native.py       how to write a kernel
declared.py     kernels that are declared by their arrays
program.py      instructions, and the program that holds them
plan.py         offsets of buffers in the arena, and where threads wait
donate.py       results in the memory of donated arguments
binding.py      addresses of one run
engine.py       threads that execute instructions
timing.py       the time of each instruction
"""
