"""The child process of `tgis.models.convert.weights`: loads .bin files without running code, writes safetensors.

`python -m tgis.models.convert.weights_child MODEL OUT FILE ...`: two directories, and names of files in the first.
"""

import json
import pickle
import re
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tgis.errors import StartError
from tgis.models.convert.weights import INDEX_SUFFIX, target_name
from tgis.models.files import read_json

Tensors = dict[str, torch.Tensor]


def convert(model: Path, out: Path, names: list[str]) -> None:
    """Write a safetensors file for each of `names`, and the index if the model has one."""
    weight_map: dict[str, str] = {}  # tensor -> file
    tied = tied_names(model)
    for name in names:
        tensors, dropped = untie(load(model / name), tied)
        target = out / target_name(name)
        save_file(tensors, target, metadata=dropped | {"format": "pt"})
        target.chmod(0o644)  # save_file makes it readable by its owner only
        weight_map |= dict.fromkeys(tensors, target.name)
    for index in model.glob(f"*.bin{INDEX_SUFFIX}"):
        content = read_json(index) | {"weight_map": weight_map}
        (out / target_name(index.name)).write_text(json.dumps(content, indent=4) + "\n")


def load(path: Path) -> Tensors:
    """The tensors of a .bin file by name; memory-mapped unless it has the format of torch before 1.6."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise StartError(f"{path.name} is broken, or holds more than tensors, which is never loaded") from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise StartError(f"{path.name} holds a {type(content).__name__}, not tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise StartError(f"{path.name} holds {name!r:.80}, which is no tensor with a name")
        if value.layout is not torch.strided or value.device.type != "cpu":
            raise StartError(f"{path.name} holds {name!r:.80}, which is no dense tensor")
        # An expanded view may claim any size
        if value.nbytes > min(path.stat().st_size, value.untyped_storage().nbytes()):
            raise StartError(f"{path.name} holds {name!r:.80}, which is larger than what is stored of it")
    return {name: value.detach() for name, value in content.items()}


def tied_names(model: Path) -> list[str]:
    """Patterns of tensors that transformers ties to others on loading, so that they need not be stored."""
    kind = read_json(model / "config.json").get("model_type") if (model / "config.json").is_file() else None
    if not isinstance(kind, str):
        return []
    import transformers  # noqa: PLC0415 - takes seconds

    transformers.utils.logging.set_verbosity_error()
    if kind not in transformers.CONFIG_MAPPING:
        return []
    config = transformers.AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    names = config.architectures if isinstance(config.architectures, list) else []
    architecture = getattr(transformers, str(names[0]), None) if names else None
    return list(getattr(architecture, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else []


def untie(tensors: Tensors, tied: list[str]) -> tuple[Tensors, dict[str, str]]:
    """Tensors that share no memory, and the dropped names, each with the name of the tensor that it is tied to.

    Dropped are aliases of a tensor that loading restores. Everything else that shares memory is copied: views into
    larger tensors, and aliases that are not known to be tied.
    """
    groups = defaultdict(list)
    for name, tensor in tensors.items():
        groups[_storage_ptr(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()].append(name)
    dropped: dict[str, str] = {}
    for names in groups.values():
        aliases = [name for name in names if any(re.match(pattern, name) for pattern in tied)]
        kept = min(set(names) - set(aliases) or names)
        dropped |= {name: kept for name in aliases if name != kept}
    kept_tensors = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    users = Counter(map(_storage_ptr, kept_tensors.values()))
    return {name: _unshared(tensor, users) for name, tensor in kept_tensors.items()}, dropped


def _storage_ptr(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _unshared(tensor: torch.Tensor, users: Mapping[int, int]) -> torch.Tensor:
    if users[_storage_ptr(tensor)] > 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def main() -> None:
    """Report any failure as one line on stderr, which the parent shows."""
    model, out, *names = sys.argv[1:]
    try:
        convert(Path(model), Path(out), names)
    except StartError as error:
        sys.exit(str(error))
    except Exception as error:  # noqa: BLE001 - process border; broken files raise anything
        lines = str(error).strip().splitlines() or [""]
        sys.exit(f"{type(error).__name__}: {lines[0]}")


if __name__ == "__main__":
    main()
