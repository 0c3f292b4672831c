"""tgis_native: paged attention for decoder-only models."""
