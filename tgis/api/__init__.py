"""The APIs: wire messages to frozen values and back, nothing else."""
