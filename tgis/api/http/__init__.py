"""The HTTP ports: probes, metrics, the debug page, and what HTTP APIs share."""
