"""Every kernel on a real GPU: backends of paged attention, against the oracle and in a CUDA graph, and the kernels of
sampling, whose tokens are those of plain PyTorch except at near ties.
"""

import filtered_cases
import gumbel_max_cases
import prefill_cases
import pytest
import quantized_cases
import torch
from chunk_batches import chunk_batch
from decode_cases import BFLOAT16, CASES, error, expected
from step_kernel_cases import errors
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams
from tgis.engines.paged import attention
from tgis.engines.paged.attention_metadata import AttentionMetadata

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
ROWS = [(7, 30), (0, 5), (16, 2), (1000, 333), (31, 17)]


def test_triton_decode_matches_the_oracle() -> None:
    from tgis.engines.kernels.cuda.paged_decode import paged_decode

    cases = CASES | BFLOAT16
    errors = {name: error(case, "cuda", paged_decode, num_sms=case.num_sms) for name, case in cases.items()}
    assert {name: off for name, off in errors.items() if off > TOLERANCE[cases[name].dtype]} == {}


def test_triton_prefill_matches_the_oracle() -> None:
    cases = prefill_cases.CASES | prefill_cases.BFLOAT16
    errors = {name: prefill_cases.error(case, "cuda") for name, case in cases.items()}
    assert {name: off for name, off in errors.items() if off > TOLERANCE[cases[name].dtype]} == {}


def test_a_captured_decode_reads_new_block_tables_and_lengths() -> None:
    params = AttentionParams(0.1)
    batch, q, keys, values = _decodes()
    layer = keys, values
    attention._triton_decode(batch, q, layer, params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attention._triton_decode(batch, q, layer, params)
    for lengths in ([64, 1, 0], [3, 50, 64], [0, 0, 0]):
        batch.seq_lens.copy_(torch.tensor(lengths))
        batch.block_tables.copy_(torch.randperm(12)[:12].view(3, 4))
        q.normal_()
        graph.replay()
        oracle = expected(q, keys, values, batch.block_tables, batch.seq_lens, params=params)
        torch.testing.assert_close(output.double(), oracle, atol=3e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 128), (4, 4, 80), (6, 1, 64), (4, 2, 256)])
@pytest.mark.parametrize(("window", "causal"), [(None, True), (1, True), (20, True), (5000, True), (None, False)])
@pytest.mark.parametrize("rows", [ROWS, [(0, 40), (0, 2), (0, 500)]])
def test_prefill_matches_the_oracle(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    window: int | None,
    causal: bool,
    rows: list[tuple[int, int]],
) -> None:
    chunks = chunk_batch(rows, heads, kv_heads, size, dtype, "cuda")
    params = AttentionParams(size**-0.5, window, causal=causal)
    arguments = chunks.batch, chunks.q, chunks.k, chunks.v, chunks.layer, params
    assert attention._select_backends(chunks.q, chunks.layer, params).prefill is attention._varlen_prefill
    for backend in (attention._varlen_prefill, attention._torch_prefill):
        output = torch.cat(backend(*arguments))
        torch.testing.assert_close(output.double(), chunks.expected(params), atol=TOLERANCE[dtype], rtol=0)


def test_prefill_accepts_strides_of_merged_projections() -> None:
    """Queries, keys and values are views of one tensor once their weights are merged."""
    chunks = chunk_batch([(0, 300), (0, 20)], 8, 2, 128, torch.bfloat16, "cuda")
    merged = torch.cat([chunks.q, chunks.k, chunks.v], 1)
    q, k, v = merged.split([8, 2, 2], 1)
    (output,) = attention._varlen_prefill(chunks.batch, q, k, v, chunks.layer, AttentionParams(0.1))
    torch.testing.assert_close(output.double(), chunks.expected(AttentionParams(0.1)), atol=3e-2, rtol=0)


def _decodes() -> tuple[AttentionMetadata, Tensor, Tensor, Tensor]:
    """Three sequences of four blocks each, 8 query and 2 KV heads: with q, keys and values."""
    tables, lengths = torch.arange(12, device="cuda").view(3, 4), torch.tensor([64, 5, 17], device="cuda")
    keys, values = (torch.randn(12, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(3, 8, 64, device="cuda", dtype=torch.bfloat16)
    return AttentionMetadata.decodes(tables, lengths), q, keys, values


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_with_quantized_weights_are_their_definition(dtype: torch.dtype) -> None:
    errors = {name: quantized_cases.error(case, "cuda", dtype) for name, case in quantized_cases.CASES.items()}
    assert {name: off for name, off in errors.items() if off > TOLERANCE[dtype]} == {}


def test_compiled_layers_with_quantized_weights_share_a_graph() -> None:
    assert quantized_cases.compiled("cuda") == {"graphs": 1, "wrong": 0}


def test_captured_products_with_quantized_weights_read_new_numbers() -> None:
    from tgis.engines.kernels.cuda.quantized import TritonGemm

    for name in ("int8 by row in order", "int4", "fp8 of 128"):
        case = quantized_cases.CASES[name]
        gemm = TritonGemm(case.weight, torch.device("cuda"))
        x, bias = (each.cuda() for each in quantized_cases.inputs_of(case, torch.bfloat16))
        gemm(x, bias)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = gemm(x, bias)
        x.normal_()
        graph.replay()
        assert torch.equal(output, gemm(x, bias)), name


@pytest.mark.parametrize("case", gumbel_max_cases.CASES.values(), ids=gumbel_max_cases.CASES.keys())
def test_tokens_are_those_of_plain_pytorch(case: gumbel_max_cases.Case) -> None:
    from tgis.engines.kernels.cuda.sampling import gumbel_max

    assert gumbel_max_cases.changed(case, gumbel_max, "cuda") < 0.02


def test_tokens_that_are_filtered_are_those_of_plain_pytorch() -> None:
    shares = {name: filtered_cases.changed(case, "cuda") for name, case in filtered_cases.CASES.items()}
    assert {name: share for name, share in shares.items() if share} == {}


def test_writes_and_choices_are_those_of_pytorch() -> None:
    wrong = errors("cuda", [torch.float32, torch.float16, torch.bfloat16])
    assert {name: count for name, count in wrong.items() if count} == {}
