"""LoRA adapters in the store: loading, errors and caching."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import BROKEN_LORA, LINEARS, RANK, TOO_LARGE_LORA, UP, Q, config, key, lora, lora_bin, matrices
from prompt_files import CONFIG, SAFETENSORS, matrix, tgis, write
from tables import table

from tgis.errors import AdapterError
from tgis.ipc.lookups import AdapterProblem, AdapterStoreOptions
from tgis.ipc.messages import EngineInfo
from tgis.prompts.lora import LoraAdapter
from tgis.prompts.store import AdapterStore
from tgis.prompts.tensor_file import TargetModel

TARGET = TargetModel(16, 8, torch.float32, torch.device("cpu"), lora_targets=LINEARS)
CAPACITY = 256 << 10
BYTES = 4 * RANK * sum(map(sum, LINEARS.values()))  # of an adapter


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    write(store / "good", lora())
    return store


@pytest.fixture
def store(root: Path) -> AdapterStore:
    return AdapterStore(str(root), CAPACITY, TARGET)


def adapter(store: AdapterStore, name: str) -> LoraAdapter:
    found = store.find(name).adapter
    assert isinstance(found, LoraAdapter)
    return found


@table("models", "scales of LoRA")
def test_the_config_determines_the_scaling(store: AdapterStore, root: Path, row: dict[str, Any]) -> None:
    write(root / "other", lora(**row["config"]))
    found, tensors = adapter(store, "other"), matrices()
    assert (found.length, found.decoder_length, found.rank, set(found.layers)) == (0, 0, RANK, set(LINEARS))
    assert BYTES <= found.size < BYTES + 6 * 512
    for layer, scale in zip((Q, UP), row["scales"], strict=True):
        weights, product = found.layers[layer], tensors[key(layer, "B")] @ tensors[key(layer, "A")]
        torch.testing.assert_close((weights.lora_a.T @ weights.lora_b).T, scale * product)


def test_layers_may_differ_in_rank_and_files_in_format_and_dtype(store: AdapterStore, root: Path) -> None:
    rounded = replace(TARGET, dtype=torch.bfloat16)
    write(root / "most", lora(matrices(512, (Q,)), r=512, lora_alpha=384))
    tensor = adapter(AdapterStore(str(root), CAPACITY, rounded), "most").layers[Q].lora_b
    assert torch.equal(tensor, (matrices(512, (Q,))[key(Q, "B")].T.double() * 0.75).bfloat16())
    write(root / "default", lora(matrices(8, (Q,))) | {CONFIG: b'{"peft_type": "LORA"}'})  # both r and lora_alpha are 8
    assert torch.equal(adapter(store, "default").layers[Q].lora_b, matrices(8, (Q,))[key(Q, "B")].T)
    tensors = matrices(2, (Q,)) | matrices(7, (UP,))
    half = {name: torch.nn.Parameter(tensor.half()) for name, tensor in tensors.items()}
    write(root / "other", lora_bin(half) | {CONFIG: config(r=2, rank_pattern={"up_proj": 7})})
    found = adapter(store, "other")
    assert (found.rank, set(found.layers)) == (7, {Q, UP})
    tensor = found.layers[UP].lora_a
    assert (tensor.dtype, tensor.requires_grad) == (torch.float32, False)
    assert torch.equal(tensor, half[key(UP, "A")].float())


@pytest.mark.parametrize("case", [*BROKEN_LORA, *TOO_LARGE_LORA])
def test_a_broken_adapter_has_a_clear_error_and_affects_no_other(store: AdapterStore, root: Path, case: str) -> None:
    files, text = (BROKEN_LORA | TOO_LARGE_LORA)[case]
    good = store.find("good").adapter
    write(root / "broken", files)
    for _ in range(2):
        with pytest.raises(AdapterError) as caught:
            store.find("broken")
        assert text in str(caught.value)
        assert caught.value.problem == AdapterProblem.BROKEN
        assert len(str(caught.value)) < 250
        assert str(caught.value).isprintable()
    assert store.find("good").adapter is good


def test_lora_modules_are_named_by_the_operator(root: Path, tmp_path: Path) -> None:
    """Any name, any directory, and links to anywhere, as in a hub cache."""
    write(tmp_path / "elsewhere", lora(matrices(seed=5)))
    (tmp_path / "snapshot").mkdir()
    for name in (CONFIG, SAFETENSORS):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "elsewhere" / name)
    modules = {"sql.v1": str(tmp_path / "snapshot"), "good": str(tmp_path / "elsewhere")}
    for path in (str(root), None):
        store = AdapterStore(path, CAPACITY, TARGET, modules)
        for name in modules:  # before one of the same id in the store
            torch.testing.assert_close(adapter(store, name).layers[Q].lora_a, matrices(seed=5)[key(Q, "A")])
    with pytest.raises(AdapterError, match="it is no LoRA module, and no adapter store was configured") as caught:
        store.find("other")
    assert caught.value.problem == AdapterProblem.NOT_FOUND


@pytest.mark.parametrize(
    ("support", "works", "refused", "text"),
    [
        ({"embedding_size": 16}, "soft", "good", "this server takes no LoRA adapters: its engine has none"),
        ({"lora_targets": LINEARS}, "good", "soft", "it is a soft prompt, which this model does not take"),
    ],
)
def test_what_a_model_does_not_take_is_said(root: Path, support: Any, works: str, refused: str, text: str) -> None:
    info = EngineInfo("fake", "M", "cpu", "float32", 100, False, False, 8, 100, 100, **support)
    assert info.supports_adapters
    store = AdapterStore.for_engine(AdapterStoreOptions(str(root), CAPACITY, 8), info)
    write(root / "soft", tgis(matrix()))
    assert store.find(works).adapter.size > 0
    with pytest.raises(AdapterError, match=text):
        store.find(refused)
