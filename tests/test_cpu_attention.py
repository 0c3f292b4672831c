"""The C kernel of decode attention against the oracle, and what happens where it cannot be compiled."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decode_cases import BFLOAT16, CASES, Case, error, inputs

from tgis.engines import cpu_attention
from tgis.engines.c_kernels import library
from tgis.engines.cpu_attention import decode_attention, has_kernel

FITTING = {name: case for name, case in CASES.items() if case.k_size % 16 == case.v_size % 16 == 0}


def in_int64(case: Case, dtype: torch.dtype) -> Case:
    return replace(case, index=torch.int64, dtype=dtype)


@pytest.fixture
def uncached() -> "Callable[[], None]":
    def clear() -> None:
        library.cache_clear()
        cpu_attention._kernel.cache_clear()

    clear()
    return clear


@pytest.mark.parametrize("name", FITTING)
def test_gives_what_attention_is(name: str) -> None:
    assert error(in_int64(FITTING[name], torch.float32), "cpu", decode_attention) < 1e-5


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_is_rounded_once(name: str) -> None:
    assert error(in_int64(BFLOAT16[name], torch.bfloat16), "cpu", decode_attention) < 2e-2


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert error(Case([600, 20, 33], heads=6, kv_heads=3), "cpu", decode_attention) < 1e-5
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_stays_visible(dtype: torch.dtype) -> None:
    tensors, rules = inputs(Case([40, 40], dtype=dtype), "cpu")
    tensors[0][1, 0] = float("nan")
    output = decode_attention(*tensors, **rules)
    assert output[1, 0].isnan().all()
    assert output[0].isfinite().all()
    assert output[1, 1:].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    tensors, rules = inputs(Case([50]), "cpu")
    tensors[0] *= 1e4
    assert decode_attention(*tensors, **rules).isfinite().all()


@pytest.mark.parametrize(("k_size", "dtype"), [(24, torch.float32), (16, torch.float64), (16, torch.float16)])
def test_other_shapes_and_dtypes_have_none(k_size: int, dtype: torch.dtype) -> None:
    (q, keys, values, *_), _ = inputs(Case([5], k_size=k_size, v_size=k_size, dtype=dtype), "cpu")
    assert not has_kernel(q, keys, values)


@pytest.mark.parametrize("compiler", [None, "#!/bin/sh\nexit 1\n"])
def test_a_machine_without_a_compiler_says_so_once(
    compiler: str | None,
    uncached: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if compiler is not None:
        (tmp_path / "cc").write_text(compiler)
        (tmp_path / "cc").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    caplog.set_level(logging.INFO)
    (q, keys, values, *_), _ = inputs(Case([5]), "cpu")
    assert not has_kernel(q, keys, values)
    assert not has_kernel(q, keys, values)
    assert len([record for record in caplog.records if "plain PyTorch" in record.message]) == 1
    uncached()
