"""Quantized weights: how a model is quantized while it is loaded, and how checkpoints that are quantized are read."""
