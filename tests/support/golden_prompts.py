"""The soft prompts of golden cases, as files."""

from pathlib import Path
from typing import Any

import prompt_files
import safetensors
import torch
from prompt_files import Files, pt, write
from transformers import AutoTokenizer


def write_prompts(prompts: dict[str, dict[str, str]], directory: Path, store: Path) -> None:
    """Write soft prompts that are the token embeddings of texts, in TGIS's layout or PEFT's."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with safetensors.safe_open(directory / "model.safetensors", "pt") as weights:
        (name,) = {"model.embed_tokens.weight", "shared.weight"} & set(weights.keys())
        table = weights.get_tensor(name)
    for prompt, parts in prompts.items():
        for name, text in parts.items():
            write(store / prompt, _prompt_files(name, table[_prompt_ids(tokenizer, text)]))


def _prompt_files(name: str, rows: torch.Tensor) -> Files:
    match name:
        case prompt_files.SAFETENSORS:
            return prompt_files.peft({prompt_files.KEY: rows})
        case prompt_files.BIN:
            return {name: pt({prompt_files.KEY: rows})}
    return {name: pt(rows)}


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
