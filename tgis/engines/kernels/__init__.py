"""Kernels for CPU and CUDA, and transfers between host and device."""
