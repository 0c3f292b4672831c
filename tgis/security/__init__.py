"""TLS, bearer tokens and caller identity."""
