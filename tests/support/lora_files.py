"""Files of LoRA adapters, valid and broken, as bytes."""

import json
from typing import Any

import safetensors.torch
import torch
import yaml
from prompt_files import BIN, CONFIG, SAFETENSORS, Files, pt
from repository import REPOSITORY

LINEARS = {"model.layers.0.q_proj": (16, 24), "model.layers.0.up_proj": (16, 40), "model.layers.1.q_proj": (16, 24)}
RANK = 4
Q, UP = "model.layers.0.q_proj", "model.layers.0.up_proj"


def key(layer: str, side: str) -> str:
    return f"base_model.model.{layer}.lora_{side}.weight"


def matrices(rank: int = RANK, layers: tuple[str, ...] = tuple(LINEARS), seed: int = 0) -> dict[str, torch.Tensor]:
    """LoRA matrices under PEFT's names."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for layer in layers:
        inputs, outputs = LINEARS[layer]
        found[key(layer, "A")] = torch.randn((rank, inputs), generator=draw)
        found[key(layer, "B")] = torch.randn((outputs, rank), generator=draw)
    return found


def config(**values: Any) -> bytes:
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj", "up_proj"]}
    return json.dumps(said | values).encode()


def lora(tensors: dict[str, torch.Tensor] | None = None, **values: Any) -> Files:
    return {CONFIG: config(**values), SAFETENSORS: safetensors.torch.save(tensors or matrices())}


def lora_bin(content: Any) -> Files:
    return {CONFIG: config(), BIN: pt(content)}


def with_tensor(layer: str, side: str, tensor: torch.Tensor) -> Files:
    return lora(matrices() | {key(layer, side): tensor})


def without_tensor(layer: str, side: str) -> Files:
    return lora({name: tensor for name, tensor in matrices().items() if name != key(layer, side)})


UNSUPPORTED: dict[str, Any] = yaml.safe_load((REPOSITORY / "tests/golden/lora.yaml").read_text())["unsupported"]
FILE = f"{SAFETENSORS}: {Q}"
BROKEN_LORA: dict[str, tuple[Files, str]] = {  # files, and the error message
    **{
        name: (lora(None, **{name: value}), f"adapter_config.json has {name}, which is not supported")
        for name, value in UNSUPPORTED.items()
    },
    "bias": (lora(bias="all"), "adapter_config.json has bias 'all', only 'none' is supported"),
    "a beginning": (lora(init_lora_weights="pissa_niter_4"), "has init_lora_weights 'pissa_niter_4', which is not"),
    "a list for a beginning": (lora(init_lora_weights=[1]), "has init_lora_weights [1], which is not"),
    "an expression for ranks": (
        lora(rank_pattern={"(.*)*x": 2}),
        "adapter_config.json has '(.*)*x' in its rank_pattern, only names are supported",
    ),
    "a long expression": (lora(rank_pattern={"(" * 300: 2}), "(((' in its rank_pattern, only names are supported"),
    "an expression for alphas": (lora(alpha_pattern={"^q_proj": 2}), "has '^q_proj' in its alpha_pattern"),
    "a rank that is text": (lora(r="8"), "adapter_config.json is not valid: Expected `int`, got `str`"),
    "no config of LoRA": (lora(rank_pattern=[1]), "adapter_config.json is not valid: "),
    "an alpha without end": (
        {**lora(), CONFIG: config().replace(b'"lora_alpha": 8', b'"lora_alpha": 1e999')},
        "adapter_config.json is not valid: ",
    ),
    "a config alone": ({CONFIG: config()}, "neither adapter_model.safetensors nor adapter_model.bin is there"),
    "garbage": ({CONFIG: config(), SAFETENSORS: b"garbage"}, "adapter_model.safetensors is damaged"),
    "cut short": ({**lora(), SAFETENSORS: lora()[SAFETENSORS][:900]}, "adapter_model.safetensors is damaged"),
    "a tensor alone": (lora_bin(torch.zeros(3, 3)), "adapter_model.bin holds no tensors by name"),
    "nothing": (lora_bin({}), "adapter_model.bin holds no tensors by name"),
    "a name that is none": (lora_bin({3: torch.zeros(3, 3)}), "adapter_model.bin holds 3, which is no matrix of LoRA"),
    "text": (lora_bin({key(Q, "A"): "text"}), f"adapter_model.bin: {Q}.lora_A holds a str, not a tensor"),
    "DoRA's magnitudes": (
        lora(matrices() | {f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(24)}),
        "lora_magnitude_vector', which is no matrix of LoRA for a linear layer",
    ),
    "embeddings": (
        lora(matrices() | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}),
        "which is no matrix of LoRA for a linear layer",
    ),
    "hostile names": (lora({"a\x1b[2J\n" * 50: torch.ones(4, 9)}), "holds 'a\\x1b[2J\\na"),
    "a vector": (with_tensor(Q, "A", torch.zeros(16)), f"{FILE}.lora_A holds a tensor of 1 dimensions, not 2"),
    "integers": (with_tensor(Q, "B", torch.zeros(24, 4).long()), f"{FILE}.lora_B holds a tensor that is no dense one"),
    "no B": (without_tensor(Q, "B"), f"{FILE} has lora_A alone"),
    "no A": (without_tensor(UP, "A"), f"{UP} has lora_B alone"),
    "another rank": (lora(r=8), f"{FILE} has matrices of rank 4 and 4, adapter_config.json says 8"),
    "two ranks": (
        with_tensor(Q, "B", torch.zeros(24, 5)),
        f"{FILE} has matrices of rank 4 and 5, adapter_config.json says 4",
    ),
    "rank 0": (lora(matrices(0), r=0), f"{FILE} has rank 0, from 1 to 512 are allowed"),
    "rank 513": (lora(matrices(513, (Q,)), r=513), f"{FILE} has rank 513, from 1 to 512 are allowed"),
    "not a target": (
        lora(target_modules=["q_proj"]),
        f"{UP} is not among the target_modules of adapter_config.json",
    ),
    "another model's inputs": (
        with_tensor(Q, "A", torch.zeros(4, 17)),
        f"{FILE} is for 17 inputs and 24 outputs, the model's layer has 16 and 24",
    ),
    "another model's outputs": (with_tensor(Q, "B", torch.zeros(25, 4)), f"{FILE} is for 16 inputs and 25 outputs"),
    "another model's layer": (
        lora({name.replace("layers.1", "layers.2"): tensor for name, tensor in matrices().items()}),
        "model.layers.2.q_proj is no linear layer of this model that can be adapted",
    ),
    "NaN": (with_tensor(Q, "A", torch.full((4, 16), torch.nan)), f"{FILE}.lora_A has numbers that are not finite"),
    "infinite": (with_tensor(Q, "B", torch.full((24, 4), torch.inf)), f"{FILE}.lora_B has numbers that are not finite"),
    "too large for the type": (
        with_tensor(Q, "B", torch.full((24, 4), 2e38)),
        f"{FILE}.lora_B has numbers that are not finite when converted from torch.float32 to torch.float32",
    ),
}
TOO_LARGE_LORA: dict[str, tuple[Files, str]] = {  # for a store of 256 KiB
    "one matrix for many layers": (
        lora_bin(dict.fromkeys((key(Q, "A"), key(UP, "A")), torch.zeros(4, 10_000))),
        "adapter_model.bin holds matrices of 320000 bytes, at most 262144 are allowed",
    ),
}
