"""Demo models, converted from registry packages."""
