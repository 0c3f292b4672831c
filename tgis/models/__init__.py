"""Model files: finding, downloading and converting them; the reader of files of torch.save."""
