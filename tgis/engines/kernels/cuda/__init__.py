"""Triton kernels and the use of PyTorch's variable-length attention."""
