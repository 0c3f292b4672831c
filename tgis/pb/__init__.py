"""Stubs of proto/generation.proto: made by proto/generate.py, committed, never edited."""
