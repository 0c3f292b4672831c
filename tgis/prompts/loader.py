"""Loads soft prompts and LoRA adapters; `peft_type` in adapter_config.json tells them apart."""

import msgspec

from tgis.prompts.files import CONFIG, AdapterDirectory
from tgis.prompts.lora import LoraAdapter, RawLora, read_lora
from tgis.prompts.soft_prompt import RawSoftPrompt, SoftPrompt, read_soft_prompt
from tgis.prompts.tensor_file import read_config

LoadedAdapter = SoftPrompt | LoraAdapter


class _PeftType(msgspec.Struct):
    peft_type: str


def read_adapter(directory: AdapterDirectory, limit: int) -> RawSoftPrompt | RawLora:
    """The adapter as stored, from files of at most `limit` bytes; AdapterError if it is missing or unusable."""
    if directory.has(CONFIG) and read_config(directory, _PeftType).peft_type == "LORA":
        return read_lora(directory, limit)
    return read_soft_prompt(directory, limit)
