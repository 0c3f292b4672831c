"""Files that the server reads while it runs, and their changes: adapters, certificates, tokens."""

import json
import math
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.certificates import Pair, make_pair

ADAPTER = "story"
_RANK = 4


class AdapterFiles:
    """A store with one adapter in two versions; a symbolic link is swapped, as Kubernetes does."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.store = directory / "store"
        self._uses: list[tuple[float, str]] = []  # (time, version in place from then on)
        for seed, version in enumerate("ab"):
            make_lora(self.store / version, model, seed)
        self.use("a")

    def versions_since(self, began: float) -> set[str]:
        """The versions in place at `began` (`time.monotonic`) or later."""
        ends = [since for since, _ in self._uses[1:]] + [math.inf]
        return {version for (_, version), end in zip(self._uses, ends, strict=True) if end >= began}

    def use(self, version: str) -> None:
        """Swap the adapter atomically."""
        self._uses.append((time.monotonic(), version))
        new = self.store / "new"
        new.symlink_to(version)
        new.replace(self.store / ADAPTER)

    def damage(self, draw: random.Random) -> None:
        """Truncate or remove a file, or remove the adapter."""
        shutil.copytree(self.store / "a", self.store / "c", dirs_exist_ok=True)
        self.use("c")
        weights = self.store / "c" / "adapter_model.safetensors"
        match draw.choice(("truncate", "remove a file", "remove")):
            case "truncate":
                os.truncate(weights, draw.randrange(weights.stat().st_size))
            case "remove a file":
                weights.unlink()
            case _:
                shutil.rmtree(self.store / "c")


def make_lora(directory: Path, model: Path, seed: int) -> None:
    """An adapter with random weights for the first layer's queries and the MLP, as PEFT saves it."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    draw = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for module, rows in {"self_attn.q_proj": hidden, "mlp.up_proj": inner}.items():
        key = f"base_model.model.model.layers.0.{module}"
        tensors[f"{key}.lora_A.weight"] = draw.standard_normal((_RANK, hidden)).astype(np.float32)
        tensors[f"{key}.lora_B.weight"] = draw.standard_normal((rows, _RANK)).astype(np.float32) / 10
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": ["q_proj", "up_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(values))


class CredentialFiles:
    """The server's certificate and key, and the tokens that it accepts."""

    def __init__(self, directory: Path) -> None:
        self.cert, self.key, self.ca, self.tokens = (directory / name for name in ("cert", "key", "ca", "tokens"))
        self._authority = make_pair(days=365)
        self.ca.write_bytes(self._authority.cert)
        self.token, self.attackers_token = "honest-0", "hostile"
        self._number = 0
        self.issue()
        self._accept(self.token)

    def issue(self, days: int = 365) -> None:
        """Issue a new certificate, which has already expired if `days` is 0."""
        pair: Pair = make_pair(self._authority, days)
        for path, text in ((self.cert, pair.cert), (self.key, pair.key)):
            _replace(path, text)

    def add_token(self) -> str:
        """Accept a new token and the current one, but none before."""
        self._number += 1
        new = f"honest-{self._number}"
        self._accept(self.token, new)
        return new

    def _accept(self, *tokens: str) -> None:
        """Write the file of accepted tokens: these and that of the attackers."""
        _replace(self.tokens, "\n".join((*tokens, self.attackers_token)).encode())


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)
