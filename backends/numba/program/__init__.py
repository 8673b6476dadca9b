"""Programs: what a function of arrays does, recorded once, and run again without it.

compiled.py     functions of trees of arrays: a program for each kind of arguments
run.py          a function of arrays, recorded
traced.py       arrays without values, which it is called with
namespace.py    the array API on them; kernels of ops are in `backends/numba/kernels`
elementwise.py, reduce.py, strided.py   kernels of the array API's functions
native.py       how kernels are written
program.py      instructions
plan.py         where their memory is, and where threads wait
donate.py       results in the memory of arguments
binding.py      addresses of one run
engine.py       threads
"""
