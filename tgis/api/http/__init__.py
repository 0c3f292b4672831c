"""The HTTP port: probes, metrics and the debug page."""
