"""Files of torch.save: tensors pass the checks and are read as torch.load alone reads them."""

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_files import pt

from tgis.errors import AdapterError
from tgis.models import torch_file
from tgis.models.torch_file import load_archive
from tgis.prompts.files import AdapterDirectory
from tgis.prompts.tensor_file import load_tensors

LIMIT = 1 << 20
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
SMALL_DTYPES = (torch.int8, torch.uint8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any type and shape, some of them views into a larger storage."""
    dtype = draw(st.sampled_from(DTYPES + SMALL_DTYPES))
    whole = torch.arange(draw(st.integers(0, 60))).to(dtype)
    view = whole[draw(st.integers(0, 5)) :: draw(st.integers(1, 3))]
    if view.dim() and len(view) % 4 == 0:
        view = view.view(-1, 4) if draw(st.booleans()) else view.view(4, -1).T
    return torch.nn.Parameter(view) if dtype.is_floating_point and draw(st.booleans()) else view


contents = st.recursive(
    tensors() | st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=8,
)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert (type(found), found) == (type(expected), expected)


@given(contents)
@settings(max_examples=40)
def test_reads_what_torch_reads(content: Any) -> None:
    data = pt(content)
    assert_same(load_archive(data, LIMIT), torch.load(io.BytesIO(data), weights_only=True))


def test_a_state_dict_with_tied_tensors() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(3, 5))
    model[1].weight = model[0].weight
    state = load_archive(pt(model.state_dict()), LIMIT)
    assert_same(state, dict(model.state_dict()))
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


def test_numbers_of_another_byte_order() -> None:
    with zipfile.ZipFile(io.BytesIO(pt(torch.arange(5.0)))) as archive:
        content = {entry: archive.read(entry) for entry in archive.namelist()}
    folder = next(iter(content)).partition("/")[0]
    content |= {f"{folder}/byteorder": b"big", f"{folder}/data/0": torch.arange(5.0).numpy().astype(">f4").tobytes()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    assert_same(load_archive(buffer.getvalue(), LIMIT), torch.arange(5.0))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_descriptions_are_limited(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million empty tensors, for example, have no bytes other than their description."""
    monkeypatch.setattr(torch_file, "MAX_DESCRIPTION_BYTES", 1000)
    tensors = {f"tensor {number}": torch.empty(0) for number in range(50)}
    (tmp_path / name).write_bytes(safetensors.torch.save(tensors) if name.endswith("safetensors") else pt(tensors))
    with pytest.raises(
        AdapterError, match=rf"^{name} describes its tensors in \d{{4}} bytes, at most 1000 are allowed$"
    ):
        load_tensors(AdapterDirectory("/", str(tmp_path)), name, LIMIT)
