"""Sums and joins over ranks by kernels that write to the memory of the other ranks."""
