"""Model files: found in a directory or the hub cache, demo models, conversions."""
