"""Benchmarks and soak tests for developers of this project; not part of the package."""
