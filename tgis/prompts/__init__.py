"""Soft prompts and LoRA adapters on disk: found, checked, loaded and cached."""
