"""The HTTP ports: probes, metrics, pages for browsers, and what HTTP APIs share."""
