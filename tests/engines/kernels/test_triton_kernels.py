"""The Triton kernels: interpreted on the CPU against the oracle, and compiled for real GPUs."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from interpreted_engine import REQUESTS
from repository import run_python
from tiny_models import make_model, tokens_alone

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def test_interpreted_draws_writes_and_choices_are_those_of_pytorch() -> None:
    """Draws except at near ties in single precision, within 1e-5."""
    found = run_python("tests/support/interpreted_kernels.py", "draw", "step", TRITON_INTERPRET="1")
    assert len(found["draw"]) == 12
    assert max(found["draw"].values()) < 0.02
    assert len(found["step"]) == 18
    assert {name: count for name, count in found["step"].items() if count} == {}


def test_interpreted_attention_and_filtered_draws_match_the_oracle() -> None:
    found = run_python("tests/support/interpreted_kernels.py", "decode", "prefill", "filtered", TRITON_INTERPRET="1")
    assert {kind: len(cases) for kind, cases in found.items()} == {"decode": 27, "prefill": 17, "filtered": 13}
    assert {name: share for name, share in found["filtered"].items() if share} == {}
    for errors in (found["decode"], found["prefill"]):
        assert {name: off for name, off in errors.items() if off > (2e-3 if "float16" in name else 1e-5)} == {}


def test_interpreted_products_with_quantized_weights_are_their_definition() -> None:
    """In float64, and in whole models; compiled layers, each with steps of its own for activations, share a graph."""
    kinds = "quantized", "models", "compiled"
    found = run_python("tests/support/interpreted_kernels.py", *kinds, TRITON_INTERPRET="1")
    assert (len(found["quantized"]), len(found["models"])) == (15, 2)
    errors = found["quantized"] | found["models"]
    assert {name: off for name, off in errors.items() if off > 1e-5} == {}
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
    assert builds.pop("a filtered draw")[0] <= 16 * 1024
    assert len(builds) == 18
    for name, (shared, wide_copies, products) in builds.items():
        assert shared <= (160 if "512 rows on sm_90" in name else 99) * 1024, name
        assert wide_copies >= 12, name
        assert products > 0, name
