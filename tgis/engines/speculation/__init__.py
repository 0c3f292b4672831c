"""Tokens computed ahead: rows for those that are proposed, and models that draft them."""
