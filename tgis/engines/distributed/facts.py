"""What nodes must have in common: versions, options and model files, compared before anything is loaded."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import torch

from tgis import __version__
from tgis.engines.loading.loader import default_dtype, load_config
from tgis.ipc.messages import EngineOptions

# of a machine: where its files are, what it logs, its threads; the rank is another for each process
_OF_A_NODE = {
    *("model_path", "speculator_path", "cache_dir", "log_level", "json_output", "num_threads"),
    *("strict", "adapter_store", "rank", "node_rank", "master_addr", "master_port"),
    *("cluster_secret_path", "cluster_interface"),
}
_WHOLE_FILES = "config.json", "quant*_config.json", "tokenizer.json", "tokenizer_config.json", "*.index.json"
_MAX_HEADER_BYTES = 100 << 20  # as in safetensors
_MAX_SHOWN = 3


def facts_of(options: EngineOptions) -> dict[str, str]:
    """The facts about this node by name. Of weights the headers and sizes count, not the numbers: these are many."""
    facts = {"tgis": __version__} | {name: version(name) for name in ("torch", "transformers")}
    names = [name for name in options.__struct_fields__ if name not in _OF_A_NODE]
    facts |= {name: repr(getattr(options, name))[:200] for name in names}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype or default_dtype(load_config(options), device)
    facts |= {"device": device.type, "dtype": str(dtype), "adapters": str(options.adapter_store is not None)}
    path = Path(options.model_path)
    for file in sorted(file for pattern in _WHOLE_FILES for file in path.glob(pattern)):
        with file.open("rb") as content:
            facts[file.name] = hashlib.file_digest(content, "sha256").hexdigest()[:16]
    weights = sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")])
    return facts | {file.name: _header_digest(file) for file in weights}


def difference(theirs: dict[str, str], node: int, ours: dict[str, str]) -> str:
    """The first facts in which a node differs from node 0; empty if none does."""
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    shown = [
        f"{name} is {theirs.get(name, 'missing')} on node {node}, {ours.get(name, 'missing')} on node 0"
        for name in names[:_MAX_SHOWN]
    ]
    return "; ".join([*shown, *["..."] * (len(names) > _MAX_SHOWN)])


def _header_digest(path: Path) -> str:
    """A digest of the header of safetensors, or of the first 100 MiB of another file, and its size."""
    with path.open("rb") as file:
        start = file.read(8)
        header = file.read(min(int.from_bytes(start, "little"), _MAX_HEADER_BYTES))
    return f"{hashlib.sha256(start + header).hexdigest()[:16]}, {path.stat().st_size} bytes"
