"""What a directory of the store holds, a soft prompt or a LoRA adapter: its config alone says which."""

import msgspec

from tgis.prompts.files import CONFIG, AdapterDirectory
from tgis.prompts.lora import LoraAdapter, RawLora, fit_lora, read_lora
from tgis.prompts.tensor_file import (
    RawSoftPrompt,
    SoftPrompt,
    TargetModel,
    fit_soft_prompt,
    read_config,
    read_soft_prompt,
)

LoadedAdapter = SoftPrompt | LoraAdapter


class _PeftType(msgspec.Struct):
    peft_type: str


def read_adapter(directory: AdapterDirectory, limit: int) -> RawSoftPrompt | RawLora:
    """What its files hold, none of them larger than `limit` bytes; PromptError for what is nothing of the kind."""
    if directory.has(CONFIG) and read_config(directory, _PeftType).peft_type == "LORA":
        return read_lora(directory, limit)
    return read_soft_prompt(directory, limit)


def fit_adapter(found: RawSoftPrompt | RawLora, target: TargetModel, version: int) -> LoadedAdapter:
    """It for the model; PromptError for what that cannot use."""
    return fit_lora(found, target, version) if isinstance(found, RawLora) else fit_soft_prompt(found, target, version)
