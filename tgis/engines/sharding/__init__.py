"""Tensor parallelism of a model: which layers are sharded, how, and their collectives."""
