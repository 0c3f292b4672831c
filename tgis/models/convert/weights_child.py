"""The child process of `tgis.models.convert.weights`: loads .bin files without running code, writes safetensors.

`python -m tgis.models.convert.weights_child MODEL OUT FILE ...`: two directories, and names of files in the first.
"""

import json
import pickle
import sys
import zipfile
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file

from tgis.errors import StartError, library_errors
from tgis.models.convert.weights import INDEX_SUFFIX, target_name
from tgis.models.files import read_json

Tensors = dict[str, torch.Tensor]


def convert(model: Path, out: Path, names: list[str]) -> None:
    """Write a safetensors file for each of `names`, and the index if the model has one."""
    weight_map: dict[str, str] = {}  # tensor -> file
    for name in names:
        tensors = copied_if_shared(load(model / name))
        target = out / target_name(name)
        save_file(tensors, target, metadata={"format": "pt"})
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
        is_dense = value.layout is torch.strided and value.device.type == "cpu"
        # An expanded view may claim any size
        if not is_dense or value.nbytes > min(path.stat().st_size, value.untyped_storage().nbytes()):
            raise StartError(f"{path.name} holds {name!r:.80}, which is not dense, or larger than what is stored of it")
    return {name: value.detach() for name, value in content.items()}


def copied_if_shared(tensors: Tensors) -> Tensors:
    """Contiguous tensors that share no memory, as safetensors needs them; transformers ties weights on loading."""
    pointers = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    uses = Counter(pointers.values())
    shared = {name: tensor.clone() for name, tensor in tensors.items() if uses[pointers[name]] > 1}
    return {name: shared.get(name, tensor).contiguous() for name, tensor in tensors.items()}


def main() -> None:
    """Report any failure as one line on stderr, which the parent shows."""
    model, out, *names = sys.argv[1:]
    try:
        with library_errors(f"broken file or failed write, of {', '.join(names):.100}"):
            convert(Path(model), Path(out), names)
    except StartError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
