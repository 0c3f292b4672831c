"""The REST API of Hugging Face's TGI."""
