"""The life of a call: validation, tokenization, text, stop sequences, metrics. Never imports torch."""
