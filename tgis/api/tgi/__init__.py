"""The TGI REST API."""
