"""The ops' Triton kernels, one file per op; nothing outside of `kernels/` imports them, and nothing without a GPU."""
