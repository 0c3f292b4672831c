"""On a real GPU: kernels in CUDA graphs, and PyTorch's variable-length attention against the oracle."""

import pytest
import quantized_cases
import torch
from attention_cases import expected_decodes
from chunk_batches import chunk_batch
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams
from tgis.engines.paged import attention
from tgis.engines.paged.attention_metadata import AttentionMetadata

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2}
ROWS = [(7, 30), (0, 5), (16, 2), (1000, 333), (31, 17)]


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
        oracle = expected_decodes(q, keys, values, batch.block_tables, batch.seq_lens, params=params)
        torch.testing.assert_close(output.double(), oracle, atol=3e-2, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
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
    assert attention._select_backends(chunks.q, chunks.layer, params)[2] is attention._varlen_prefill
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
