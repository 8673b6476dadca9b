"""Programs: what a function of arrays does, recorded once, and run again without it.

traced.py     arrays without values, which a function is called with
namespace.py  the array API on them; kernels of ops are in `backends/numba/kernels`
program.py    instructions
plan.py       where their memory is, and where threads wait
native.py     how kernels are written
binding.py    addresses of one run
engine.py     threads
run.py        a function, recorded
"""
