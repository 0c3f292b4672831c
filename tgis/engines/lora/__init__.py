"""LoRA adapters and soft prompts inside the model."""
