"""Structured output: grammars that generated text must follow, compiled, and the tokens that they allow."""
