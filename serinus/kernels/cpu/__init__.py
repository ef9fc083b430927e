"""The `cpu` column: numba kernels that read pages where they lie, and oneDNN linears on weights packed once.

How a kernel is made. Each is a numba `cfunc` void(void *arguments): plain machine code with a C address, compiled for
one head size, group and dtype, kept on the disk by numba's cache. Python fills one ctypes structure with addresses
and sizes and calls it: about 2 us a call, where a numba dispatcher takes 1 us per array argument to look at types.
bf16 rows are widened by a bit shift in registers, computed in fp32 and rounded to the nearest even.
"""
