"""hf_transformers: padded batches of any causal or sequence-to-sequence model."""
