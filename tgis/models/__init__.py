"""Model files: finding, downloading and converting them."""
