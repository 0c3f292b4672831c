"""The Triton kernels against oracles: on a GPU if there is one, else interpreted; and compiled for real GPUs.

Triton interprets all kernels or none of a process (tests/conftest.py), and no bfloat16.
"""

import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import filtered_cases
import gumbel_max_cases
import pytest
import quantized_cases
import torch
from attention_cases import BFLOAT16_CHUNKS, BFLOAT16_DECODES, CHUNKS, DECODES, Case, decode_error, prefill_error
from batches import engine_options, limits
from repository import run_python
from slow_cases import slow_except
from tiny_models import check_greedy, generate_all, greedy_requests, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from tgis.engines.paged import attention
from tgis.engines.paged.engine import PagedEngine
from tgis.engines.sampling import draws

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy computes what is not finite
]
if find_spec("triton") is not None:
    from triton.runtime import interpreter

    from tgis.engines.kernels.cuda import kv_cache, quantized, sampling

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
DTYPES = [*TOLERANCE] if ON_GPU else [torch.float32, torch.float16]
INF, NAN = float("inf"), float("nan")
SCORES = {
    "one token": torch.tensor([[0.5]]),
    "equal scores": torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -0.0, 0.0, -1.0]]),
    "not finite": torch.tensor([[1.0, INF, INF], [1.0, NAN, 2.0], [-INF] * 3, [NAN] * 3, [-INF, 1.0, -INF]]),
    "several blocks": torch.randint(50, (3, 9000), generator=torch.Generator().manual_seed(0)).float(),
    "a view": torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))[:, 7:4200],
}
WRITES = {  # tokens, heads, sizes of keys and values, block size
    "one token": (1, 2, 16, 16, 16),
    "odd sizes": (7, 3, 24, 72, 8),
    "one head": (33, 1, 128, 64, 1),
    "Llama": (5, 8, 128, 128, 16),
}


FILTERED = "steep", "grammar", "top_k and top_p", "a list too short for top_p", "no number"


def cases(*tables: dict[str, Any]) -> list[Any]:
    return [pytest.param(case, id=name) for table in tables for name, case in table.items()]


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    """Triton 3.6 converts arrays of one element to int, which numpy has refused since 2.4; 3.7 does not."""
    patch = interpreter._patch_lang_tensor

    def repaired(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = repaired


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases(WRITES))
def test_keys_and_values_are_written_to_their_slots(case: tuple[int, ...], dtype: torch.dtype) -> None:
    """Views of one tensor, as merged projections give them."""
    tokens, heads, k_size, v_size, block_size = case
    generator = torch.Generator().manual_seed(0)
    merged = torch.randn(tokens, heads * (k_size + v_size), generator=generator).to(DEVICE, dtype)
    flat = merged.split([heads * k_size, heads * v_size], 1)
    k, v = (part.unflatten(1, (heads, -1)) for part in flat)
    num_blocks = 2 * tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens].to(DEVICE)
    shape = num_blocks, block_size, heads
    keys, values = (torch.full((*shape, size), 7.0, device=DEVICE, dtype=dtype) for size in (k_size, v_size))
    wanted = [cache.flatten(0, 1).index_copy(0, slots, new) for cache, new in ((keys, k), (values, v))]
    kv_cache.write_kv_cache(k, v, keys, values, slots)
    assert torch.equal(keys.flatten(0, 1), wanted[0])
    assert torch.equal(values.flatten(0, 1), wanted[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scores", cases(SCORES))
def test_the_best_token_is_the_first_of_a_scan_from_the_left(scores: Tensor, dtype: torch.dtype) -> None:
    scores = scores.to(DEVICE, dtype)
    for row, found in zip(scores.cpu(), sampling.best_token_table(scores).tolist(), strict=True):
        if row.max().isfinite():
            assert found == [row.tolist().index(row.max().item()), 0, 0, 0, 0]
        else:
            assert found[1] == 1
            assert found[0] in range(len(row))


@pytest.mark.parametrize("case", cases(DECODES, BFLOAT16_DECODES if ON_GPU else {}))
def test_decode_attention_is_the_oracles(case: Case) -> None:
    assert decode_error(case, DEVICE.type) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", cases(CHUNKS, BFLOAT16_CHUNKS if ON_GPU else {}))
def test_prefill_attention_is_the_oracles(case: Case) -> None:
    assert prefill_error(case, DEVICE.type) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", cases(gumbel_max_cases.CASES))
def test_draws_are_those_of_pytorch(case: gumbel_max_cases.Case) -> None:
    """Except at near ties in single precision, within 1e-5."""
    if case.dtype == torch.bfloat16 and not ON_GPU:
        pytest.skip("not interpreted")
    some = case if ON_GPU else replace(case, rows=min(case.rows, 5))
    assert gumbel_max_cases.changed(some, sampling.gumbel_max, DEVICE.type) < 0.02


@pytest.mark.parametrize("name", slow_except(FILTERED, filtered_cases.CASES))
def test_filtered_draws_are_those_of_pytorch(name: str) -> None:
    assert filtered_cases.changed(filtered_cases.CASES[name], DEVICE.type) == 0


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.float32])
@pytest.mark.parametrize("case", cases(quantized_cases.CASES))
def test_products_with_quantized_weights_are_their_definition(case: quantized_cases.Case, dtype: torch.dtype) -> None:
    assert quantized_cases.error(case, DEVICE.type, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", quantized_cases.CASES.values(), ids=quantized_cases.CASES)
def test_products_by_pytorch_are_their_definition(
    case: quantized_cases.Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a card has no kernel; the weight is widened in several parts."""
    monkeypatch.setattr(quantized, "_PART", 10 * case.inputs)
    monkeypatch.setattr(quantized, "has_kernels", lambda _: False)
    assert quantized_cases.error(case, DEVICE.type, dtype, "__call__") < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="test_models_gpu.py does more")
def test_an_engine_with_interpreted_kernels_generates_what_transformers_does(tmp_path: Path) -> None:
    """Keys and values written, attention in chunks and decodes, and tokens chosen, all by kernels that passed."""
    model, requests = make_model("Llama", tmp_path), greedy_requests(5, 5, random.Random(5))
    bounds = limits(400, padded=False, block_size=16, max_batch_size=3, prefill_tokens=16)
    properties = mock.Mock(return_value=SimpleNamespace(multi_processor_count=2))
    with (
        mock.patch.object(attention, "has_kernels", return_value=True),
        mock.patch.object(draws, "has_kernels", return_value=True),
        mock.patch.object(torch.cuda, "get_device_properties", properties),
    ):
        engine = PagedEngine(engine_options(model, 3, cpu_isa="none"))
        generated = generate_all(engine, bounds, requests, random.Random(1))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for request, tokens in zip(requests, generated, strict=True):
        check_greedy(reference, request.tokens, tokens)
    ops: Any = engine._sampler._ops
    self_tests = [
        engine.runner.attention._self_test,
        *(op.args[0] for op in (ops.best_tokens, ops.draw, ops.draw_filtered)),
    ]
    passed = {kernel.__name__ for test in self_tests for (kernel, _), fit in test._passed.items() if fit}
    assert passed == {f"_triton_{name}" for name in ("best", "decode", "draw", "draw_filtered", "prefill", "write")}


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="the other tests compile them")
def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """Attention with wide asynchronous copies and tensor cores, within the shared memory of smaller chips."""
    variables = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    builds = run_python("tests/support/triton_compilation.py", **variables)
    assert all(builds.pop(name)[0] <= 1024 for name in ("a draw", "an argmax", "a write"))
    assert builds.pop("a filtered draw")[0] <= 16 * 1024
    assert len(builds) == 18
    for name, (shared, wide_copies, products) in builds.items():
        assert shared <= (160 if "512 rows on sm_90" in name else 99) * 1024, name
        assert wide_copies >= 12, name
        assert products > 0, name
