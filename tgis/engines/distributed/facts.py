"""The facts that nodes must have in common, compared before anything is loaded: versions, options and model files."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import torch

from tgis import __version__
from tgis.engines.loading.loader import default_dtype, load_config
from tgis.ipc.messages import EngineOptions

# Options that may differ from node to node.
_LOCAL_OPTIONS = {
    *("model_path", "speculator_path", "cache_dir", "log_level", "json_output", "num_threads"),
    *("strict", "adapter_store", "rank", "node_rank", "master_addr", "master_port"),
    *("cluster_secret_path", "cluster_interface"),
}
_HASHED_FILES = "config.json", "quant*_config.json", "tokenizer.json", "tokenizer_config.json", "*.index.json"


def facts_of(options: EngineOptions) -> dict[str, str]:
    """The facts of this node by name. Weights are compared by size: hashing takes minutes."""
    facts = {"tgis": __version__} | {name: version(name) for name in ("torch", "transformers")}
    names = [name for name in options.__struct_fields__ if name not in _LOCAL_OPTIONS]
    facts |= {name: repr(getattr(options, name))[:200] for name in names}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype or default_dtype(options, load_config(options), device)
    facts |= {"device": device.type, "dtype": str(dtype), "adapters": str(options.adapter_store is not None)}
    path = Path(options.model_path)
    for file in sorted(file for pattern in _HASHED_FILES for file in path.glob(pattern)):
        with file.open("rb") as content:
            facts[file.name] = hashlib.file_digest(content, "sha256").hexdigest()[:16]
    weights = sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")])
    return facts | {file.name: f"{file.stat().st_size} bytes" for file in weights}


def difference(theirs: dict[str, str], node: int, ours: dict[str, str]) -> str:
    """The first fact in which a node differs from node 0, as text; empty without differences."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name, 'missing')} on node {node}, {ours.get(name, 'missing')} on node 0"
    return ""
