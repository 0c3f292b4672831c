"""Which GEMM multiplies by a weight: right ones only, the fastest if there are several, and the same at every start."""

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from cpu_kernels import kernels_of, kernels_with_amx
from torch import Tensor

from tgis.engines.kernels.cpu import gemm_selection
from tgis.engines.kernels.cpu.gemm import CpuGemm, Gemm, MakeGemm, OneDnnGemm
from tgis.engines.kernels.cpu.gemm_selection import GemmSelector
from tgis.engines.kernels.cpu.library import CpuKernels

WEIGHT = torch.ones(32, 64)
ROWS = 4  # how many numbers of rows are measured


@pytest.fixture
def kernels() -> CpuKernels:
    return kernels_of("generic")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of a call of gemm.c, gemm_amx.c and oneDNN, instead of measured ones."""
    seconds = {"gemm": 1.0, "gemm_amx": 1.0, "onednn": 1.0}

    def measured(make: MakeGemm, _weight: Tensor) -> list[float]:
        name = make.keywords.get("function", "gemm") if isinstance(make, partial) else "onednn"
        return [seconds[name]] * ROWS

    monkeypatch.setattr(gemm_selection, "_seconds", measured)
    return seconds


def test_ours_without_a_measurement_unless_neighbours_may_change_bits(
    kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(gemm_selection, "_seconds")
    selector = GemmSelector(kernels)
    assert type(selector.gemm(WEIGHT)) is CpuGemm
    assert selector.counts == {"generic": 1}
    assert GemmSelector(kernels).gemm(WEIGHT.double()) is None
    assert type(GemmSelector(None).gemm(WEIGHT)) is OneDnnGemm


@pytest.mark.parametrize(("onednn", "expected"), [(0.5, OneDnnGemm), (0.95, CpuGemm), (2.0, CpuGemm)])
def test_onednn_has_to_be_clearly_faster(
    kernels: CpuKernels, times: dict[str, float], onednn: float, expected: type
) -> None:
    times["onednn"] = onednn
    assert type(GemmSelector(kernels, batch_invariant=False).gemm(WEIGHT)) is expected


@pytest.mark.parametrize(("amx", "expected"), [(0.5, "amx"), (0.95, "avx512_bf16")])
def test_of_our_own_the_fastest(times: dict[str, float], amx: float, expected: str) -> None:
    times["gemm_amx"] = amx
    selector = GemmSelector(kernels_with_amx())
    selector.gemm(WEIGHT.bfloat16())
    selector.gemm(WEIGHT)  # AMX has no float32
    assert selector.counts == {expected: 1} | {"avx512_bf16": 2 if expected == "avx512_bf16" else 1}


def test_a_measurement_is_made_once_and_kept(
    kernels: CpuKernels, times: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    times["onednn"] = 0.5
    for _ in range(2):
        selector = GemmSelector(kernels, str(tmp_path), batch_invariant=False)
        assert [type(selector.gemm(WEIGHT)) for _ in range(2)] == [OneDnnGemm, OneDnnGemm]
        times["onednn"] = 2.0  # a slow moment at the second start
    assert [record.getMessage() for record in caplog.records] == [
        "linear layers float32 64 -> 32 by generic, onednn take generic 1e+03, 1e+03, 1e+03, 1e+03; "
        "onednn 500, 500, 500, 500 ms with 1, 8, 32, 128 rows: using onednn"
    ]
    (path,) = (tmp_path / "kernels").glob("*.json")
    assert json.loads(path.read_text()) == {"float32 64 -> 32 by generic, onednn": "onednn"}


@pytest.mark.parametrize("text", ["{", "[]", '{"float32 64 -> 32 by generic, onednn": "another"}'])
def test_what_is_kept_may_be_damaged(kernels: CpuKernels, times: dict[str, float], tmp_path: Path, text: str) -> None:
    GemmSelector(kernels, str(tmp_path), batch_invariant=False).gemm(WEIGHT)
    (path,) = (tmp_path / "kernels").glob("*.json")
    path.write_text(text)
    times["onednn"] = 0.5
    assert type(GemmSelector(kernels, str(tmp_path), batch_invariant=False).gemm(WEIGHT)) is OneDnnGemm


def test_a_gemm_that_is_wrong_on_this_cpu_is_off(
    kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(weight: Tensor) -> Gemm:
        return CpuGemm(weight * 1.1, kernels)

    def depends_on_others(weight: Tensor) -> Gemm:
        gemm = CpuGemm(weight, kernels)
        return lambda x, bias: gemm(x, bias) * (1 + 1e-6 * len(x))

    right = partial(CpuGemm, kernels=kernels)
    makers: dict[str, MakeGemm] = {"wrong": wrong, "dependent": depends_on_others, "right": right}
    monkeypatch.setattr(gemm_selection, "our_gemms", lambda _weight, _kernels: makers)
    selector = GemmSelector(kernels)
    for _ in range(2):
        selector.gemm(WEIGHT)
    assert selector.counts == {"right": 2}
    assert [record.getMessage() for record in caplog.records] == [
        f"CPU kernels: linear layers by {name} in float32 are wrong on this CPU, and off"
        for name in ("wrong", "dependent")
    ]


def test_a_real_measurement(kernels: CpuKernels) -> None:
    selector = GemmSelector(kernels, batch_invariant=False)
    assert type(selector.gemm(WEIGHT)) in (CpuGemm, OneDnnGemm)
