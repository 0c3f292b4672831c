"""What a directory of the store holds, a soft prompt or a LoRA adapter: its config alone says which."""

import msgspec

from tgis.prompts.files import CONFIG, PromptDirectory
from tgis.prompts.lora import LoraAdapter, LoraFile, fit_lora, read_lora
from tgis.prompts.tensor_file import Parts, SoftPrompt, Target, fit, read_config, read_parts

Adapter = SoftPrompt | LoraAdapter


class _Kind(msgspec.Struct):
    peft_type: str


def read_adapter(directory: PromptDirectory, limit: int) -> Parts | LoraFile:
    """What its files hold, none of them larger than `limit` bytes; PromptError for what is nothing of the kind."""
    if directory.has(CONFIG) and read_config(directory, _Kind).peft_type == "LORA":
        return read_lora(directory, limit)
    return read_parts(directory, limit)


def fit_adapter(found: Parts | LoraFile, target: Target, version: int) -> Adapter:
    """It for the model; PromptError for what that cannot use."""
    return fit_lora(found, target, version) if isinstance(found, LoraFile) else fit(found, target, version)
