"""Tensor parallelism as a model sees it: which layers are shared, how, and what ranks add up."""
