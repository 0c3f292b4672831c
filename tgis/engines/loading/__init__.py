"""Loading a model and preparing its layers."""
