"""Models with random weights in the shapes of known ones, and the closed loops that they are measured with."""

import json
import random
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from benchmarks.gpu import byte_tokenizer

SEED = 1
# Which weights are made how much larger: a new model repeats a token, and any two engines would agree.
_LARGER = {
    "encoder-decoder": (re.compile(r"\.(fc1|fc2|DenseReluDense)\."), 4.0),
    "decoder": (re.compile(r"\.\d+\."), 6.0),
}
# Of a decoder: looked up by row, or computed once for each input.
_NOT_READ = re.compile(
    r"embed_tokens|embed_positions|wte|word_embeddings|encoder_attn\.[kv]_proj|EncDecAttention\.[kv]\."
)


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loops; lengths in tokens."""

    input_tokens: int  # on average
    output_tokens: int
    streams: tuple[int, ...]

    def inputs(self, streams: int, vocab_size: int, seed: str) -> list[list[int]]:
        """Two or more for each stream, of random tokens without the first two and the last, which may be special."""
        rng, spread = random.Random(seed), self.input_tokens // 3
        lengths = [self.input_tokens + rng.randint(-spread, spread) for _ in range(max(4, 2 * streams))]
        return [rng.choices(range(2, vocab_size - 1), k=length) for length in lengths]


@dataclass(frozen=True, slots=True)
class Model:
    """A shape and its load."""

    kind: str  # of transformers
    settings: dict[str, Any]
    load: Load

    def config(self) -> Any:
        return getattr(transformers, f"{self.kind}Config")(**self.settings)

    def make(self, cache: Path) -> Path:
        """Its directory, written once, with random weights and a tokenizer that servers need to start."""
        digest = zlib.crc32(json.dumps(self.settings).encode())
        directory = cache / "random-models" / f"{self.kind}-{digest:08x}"
        if not (directory / "tokenizer.json").exists():  # the last file that is written
            self._new_model().save_pretrained(directory)
            saved = json.loads((directory / "config.json").read_text())
            (directory / "config.json").write_text(json.dumps(saved | self.settings, indent=1) + "\n")
            byte_tokenizer(self.settings["vocab_size"]).save(str(directory / "tokenizer.json"))
        return directory

    def _new_model(self) -> Any:
        config = self.config()
        torch.manual_seed(SEED)
        model = _family(config).from_config(config, dtype=torch.float32)
        if self.settings.get("tie_word_embeddings") is False:  # a new T5 is tied nevertheless
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        names, factor = _LARGER["encoder-decoder" if config.is_encoder_decoder else "decoder"]
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and names.search(name):
                weight.data *= factor
        return model


TRANSLATIONS = Load(55, 61, (1, 8, 32))
TEXTS = Load(130, 64, (8, 32))
OPUS_MT = {
    "vocab_size": 59514,
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "activation_function": "swish",
    "scale_embedding": True,
    "max_position_embeddings": 512,
    "pad_token_id": 59513,
    "decoder_start_token_id": 59513,
    "eos_token_id": 0,
    "forced_eos_token_id": None,
}
FLAN_T5_SMALL = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "vocab_size": 64000}
ENCODER_DECODERS = {
    "opus-mt-en-fr": Model("Marian", OPUS_MT, TRANSLATIONS),
    "flan-t5-small": Model("T5", FLAN_T5_SMALL, TRANSLATIONS),
}
DECODERS = {
    "bloom": Model("Bloom", ENDS | {"hidden_size": 768, "n_layer": 12, "n_head": 12}, TEXTS),
    "mpt": Model("Mpt", ENDS | {"d_model": 768, "n_layers": 12, "n_heads": 12}, TEXTS),
    "falcon": Model("Falcon", ENDS | {"hidden_size": 832, "num_hidden_layers": 12, "num_attention_heads": 13}, TEXTS),
    "gpt-j": Model(
        "GPTJ", ENDS | {"vocab_size": 32000, "n_embd": 768, "n_layer": 12, "n_head": 12, "rotary_dim": 32}, TEXTS
    ),
}


def _family(config: Any) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def step_weights(config: Any) -> int:
    """How many numbers of the model a decode step reads."""
    with torch.device("meta"):
        model = _family(config).from_config(config)
    part = model.get_decoder() if config.is_encoder_decoder else model
    read = {id(weight): weight.numel() for name, weight in part.named_parameters() if not _NOT_READ.search(name)}
    logits = model.get_output_embeddings().weight
    return sum((read | {id(logits): logits.numel()}).values())
