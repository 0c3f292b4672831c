"""Benchmarks and the soak tests for the developers of this project; not part of the package."""
