"""Conversions of weights and tokenizers."""
