"""A model and its tokenizer as transformers loads them, with the options of the server that is compared with them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prompt_files
import safetensors
import torch
from golden_cases import Json
from prompt_files import DECODER, ENCODER, Files, pt, write
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DynamicCache,
    EncoderDecoderCache,
)


@dataclass(frozen=True, slots=True)
class SoftPrompt:
    """A soft prompt made of the embeddings of tokens: the model sees them, nothing else does."""

    encoder: list[int] = field(default_factory=list)
    decoder: list[int] = field(default_factory=list)

    @classmethod
    def from_texts(cls, parts: dict[str, str], tokenizer: Any) -> "SoftPrompt":
        """PEFT's files hold what stands before the output."""
        parts = {ENCODER if name == ENCODER else DECODER: text for name, text in parts.items()}
        return cls(*(_prompt_ids(tokenizer, parts.get(name, "")) for name in (ENCODER, DECODER)))


class OracleModel:
    """A model, its tokenizer and the options of its server."""

    def __init__(self, directory: Path, options: Json, prompts: dict[str, dict[str, str]]) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.encoder_decoder: bool = AutoConfig.from_pretrained(directory).is_encoder_decoder
        family = AutoModelForSeq2SeqLM if self.encoder_decoder else AutoModelForCausalLM
        self.network: Any = family.from_pretrained(directory, dtype=torch.float32).eval()
        eos = self.network.generation_config.eos_token_id
        self.eos_ids: list[int] = eos if isinstance(eos, list) else [eos]
        first, bare = self.encode("A")[0], self.tokenizer("A", add_special_tokens=False).input_ids[0]
        self.bos_id = None if first == bare else first
        self.sequence_length = int(options["MAX_SEQUENCE_LENGTH"])
        self.new_tokens = min(int(options["MAX_NEW_TOKENS"]), self.sequence_length - 1)
        self.include_stop_sequence = options.get("DEFAULT_INCLUDE_STOP_SEQS", "true") == "true"
        self.prompts = {name: SoftPrompt.from_texts(parts, self.tokenizer) for name, parts in prompts.items()}
        self.pad_id: int = self.network.config.pad_token_id
        self.show_special = options.get("OUTPUT_SPECIAL_TOKENS", "false") == "true"

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text).input_ids
        return ids

    def truncate(self, ids: list[int], limit: int) -> list[int]:
        if not 0 < limit < len(ids):
            return ids
        kept = ids[-limit:]
        return kept if self.bos_id is None else [self.bos_id, *kept[1:]]

    def token_strings(self, ids: list[int]) -> list[str]:
        names: list[str] = self.tokenizer.convert_ids_to_tokens(ids)
        return names

    def decode(self, ids: list[int]) -> str:
        if self.show_special and ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        text: str = self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=not self.show_special)
        return text


class ForwardPasses:
    """The forward passes over one input and its output."""

    def __init__(self, model: OracleModel, ids: list[int], prompt: SoftPrompt) -> None:
        self._network = model.network
        self._past: Any = DynamicCache()
        self._argument = "input_ids"
        self._encoded = {}
        self.soft_prompt = prompt.decoder  # decoder tokens before the output
        self.start_ids = ids  # what the output continues
        if model.encoder_decoder:
            self._past = EncoderDecoderCache(DynamicCache(), DynamicCache())
            self._argument = "decoder_input_ids"
            self._encoded = {"encoder_outputs": self._network.get_encoder()(torch.tensor([prompt.encoder + ids]))}
            self.start_ids = [self._network.generation_config.decoder_start_token_id]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """The logits after each of the next ids, [T, V] float64."""
        inputs = {self._argument: torch.tensor([ids])} | self._encoded
        logits: torch.Tensor = self._network(**inputs, past_key_values=self._past, use_cache=True).logits[0]
        return logits.double()


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
