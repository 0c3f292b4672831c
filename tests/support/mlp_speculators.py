"""Random MLP speculators, as fms-extras writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]


def random_mlp(config: dict[str, Any]) -> Weights:
    """Weights by the names that fms-extras gives them."""
    draw, weights, inner = torch.Generator().manual_seed(0), {}, config["inner_dim"]
    for stage in range(2 if config.get("tie_weights") else config["n_predict"]):
        sizes = {"emb": (config["vocab_size"], inner), "head": (config["vocab_size"], inner), "ln": (inner,)}
        if stage and config.get("tie_weights"):
            sizes = {}
        sizes["proj"] = inner, inner if stage else config["emb_dim"]
        for name, size in sizes.items():
            weights[f"speculator.{name}.{stage}.weight"] = torch.randn(size, generator=draw) * 0.5 + (name == "ln")
        if "ln" in sizes:
            weights[f"speculator.ln.{stage}.bias"] = torch.randn(inner, generator=draw) * 0.1
    return weights


def save_mlp(path: Path, config: dict[str, Any], weights: Weights) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path
