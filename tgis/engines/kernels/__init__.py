"""Kernels for CPU and CUDA."""
