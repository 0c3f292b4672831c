"""Adapters on disk, both soft prompts and LoRA adapters: found, checked, loaded and cached."""
