"""One op a file: its kernels for the arrays of programs."""
