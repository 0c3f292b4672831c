"""Benchmarks and the soak test for the developers of this project; not part of the package."""
