"""The Triton kernels: interpreted on the CPU against the oracle, and compiled for real GPUs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from interpreted_engine import REQUESTS
from repository import run_python
from tiny_models import make_model, tokens_alone

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(scope="module")
def found() -> Any:
    """What one process finds, which takes seconds to start: for each kind and case how far the kernel is off."""
    kinds = "draw", "step", "decode", "prefill", "filtered", "quantized", "compiled"
    return run_python("tests/support/interpreted_kernels.py", *kinds, TRITON_INTERPRET="1")


def too_far(errors: dict[str, float]) -> dict[str, float]:
    return {name: off for name, off in errors.items() if off > (2e-3 if "float16" in name else 1e-5)}


def test_interpreted_draws_writes_and_choices_are_those_of_pytorch(found: dict[str, dict[str, float]]) -> None:
    """Draws except at near ties in single precision, within 1e-5."""
    assert len(found["draw"]) == 12
    assert max(found["draw"].values()) < 0.02
    for kind, count in (("step", 18), ("filtered", 11)):
        assert len(found[kind]) == count
        assert {name: off for name, off in found[kind].items() if off} == {}


def test_interpreted_attention_matches_the_oracle(found: dict[str, dict[str, float]]) -> None:
    for kind, count in (("decode", 11), ("prefill", 6)):
        assert (len(found[kind]), too_far(found[kind])) == (count, {})


@pytest.mark.slow
def test_interpreted_kernels_are_right_in_all_cases() -> None:
    """And in models that are loaded as for a GPU."""
    kinds = {"decode+": 16, "prefill+": 11, "filtered+": 4, "models": 2}
    rest = run_python("tests/support/interpreted_kernels.py", *kinds, TRITON_INTERPRET="1")
    assert {kind: (len(errors), too_far(errors)) for kind, errors in rest.items()} == {
        kind: (count, {}) for kind, count in kinds.items()
    }


def test_interpreted_products_with_quantized_weights_are_their_definition(found: dict[str, dict[str, float]]) -> None:
    """In float64; compiled layers, each with steps of its own for activations, share a graph."""
    assert (len(found["quantized"]), too_far(found["quantized"])) == (17, {})
    assert found["compiled"] == {"graphs": 1, "wrong": 0}


@pytest.mark.slow
def test_an_engine_with_interpreted_kernels_generates_what_transformers_does(tmp_path: Path) -> None:
    """Keys and values written, attention in chunks and decodes, and tokens chosen, all by kernels that passed."""
    model = make_model("Llama", tmp_path)
    found = run_python("tests/support/interpreted_engine.py", model, TRITON_INTERPRET="1")
    kernels = ["best", "decode", "draw", "draw_filtered", "prefill", "write"]
    assert found["kernels"] == [f"_triton_{name}" for name in kernels]
    assert found["tokens"] == tokens_alone(model, REQUESTS)


@pytest.mark.slow
def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """Attention with wide asynchronous copies and tensor cores, within the shared memory of smaller chips."""
    builds = run_python("tests/support/triton_compilation.py", TRITON_CACHE_DIR=str(tmp_path))
    assert all(builds.pop(name)[0] <= 1024 for name in ("a draw", "an argmax", "a write"))
    assert all(builds.pop(name)[0] <= 16 * 1024 for name in ("a filtered draw", "a searched draw"))
    assert len(builds) == 18
    for name, (shared, wide_copies, products) in builds.items():
        assert shared <= (160 if "512 rows on sm_90" in name else 99) * 1024, name
        assert wide_copies >= 12, name
        assert products > 0, name
