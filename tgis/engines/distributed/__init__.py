"""Tensor parallelism: one engine over several processes."""
