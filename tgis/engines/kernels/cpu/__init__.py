"""C kernels and their Python wrappers."""
