"""Quantized checkpoints with random damage: each is a StartError of one line, or a model, and takes little memory."""

import random
import resource
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from quantized_formats import FORMATS, load, quantized_copy
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from torch import Tensor

from tgis.errors import StartError

TIMES, MAX_GROWTH = 10, 256 << 10  # KiB
VALUES: list[Any] = [None, "x" * 300, "re:(a*)*$", -1, 0, 3, 10**18, 10**30, 1.5, True, [], [0, 128], {}, {"format": 5}]
DTYPES = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64, torch.float8_e4m3fn]


def damaged(tensor: Tensor, draw: random.Random) -> Tensor | None:
    """With another shape, dtype or content; None: none at all."""
    match draw.randrange(8):
        case 0:
            return None
        case 1:
            return tensor.flatten()[: draw.randrange(tensor.numel() + 1)]
        case 2:
            return tensor.unsqueeze(draw.randrange(tensor.dim() + 1))
        case 3:
            return tensor.mT if tensor.dim() > 1 else tensor.repeat(2)
        case 4:
            return tensor.to(draw.choice(DTYPES))
        case 5:
            return torch.cat([tensor.flatten()] * 2)
        case 6 if tensor.is_floating_point() and tensor.itemsize > 1:
            return (
                tensor.float()
                .index_fill(0, torch.tensor([0]), draw.choice([1e38, torch.nan, torch.inf]))
                .to(tensor.dtype)
            )
    octets = tensor.contiguous().view(-1).view(torch.uint8).clone()
    octets[draw.randrange(len(octets))] = draw.randrange(256)
    return octets.view(tensor.dtype).view(tensor.shape)


def damage_config(config: Any, draw: random.Random) -> None:
    """Put another value somewhere."""
    while True:
        key = draw.choice([*config] if isinstance(config, dict) else range(len(config)))
        if not config[key] or not isinstance(config[key], dict | list) or draw.random() < 0.1:
            config[key] = draw.choice(VALUES)
            return
        config = config[key]


def damage(path: Path, draw: random.Random) -> None:
    file, weights = path / "config.json", path / "model.safetensors"
    match draw.randrange(4):
        case 0:
            config = msgspec.json.decode(file.read_bytes())
            damage_config(config["quantization_config"], draw)
            file.write_bytes(msgspec.json.encode(config, enc_hook=str))
        case 1:
            content = bytearray(weights.read_bytes())
            end = draw.randrange(len(content)) if draw.random() < 0.5 else len(content)
            content[draw.randrange(4000)] = draw.randrange(256)  # of the header
            weights.write_bytes(content[:end])
        case _:
            tensors = load_file(weights)
            name = draw.choice([name for name in tensors if ".layers.0." in name and "norm" not in name])
            found = damaged(tensors.pop(name), draw)
            save_file(tensors | ({} if found is None else {name: found.contiguous()}), weights, {"format": "pt"})


@pytest.mark.parametrize("name", FORMATS)
def test_damage(name: str, tmp_path: Path) -> None:
    config, quantize = FORMATS[name]
    whole, draw = make_model("Llama", tmp_path / "whole"), random.Random(name)
    quantized_copy(whole, quantize, config)
    load(whole)
    before, errors = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, set()
    for number in range(TIMES):
        path = shutil.copytree(whole, tmp_path / str(number))
        damage(path, draw)
        try:
            load(path)
        except StartError as error:
            errors.add(str(error))
    assert len(errors) > TIMES // 3
    assert all(len(error) < 500 and "\n" not in error for error in errors), errors
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + MAX_GROWTH
