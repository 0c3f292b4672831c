"""Plain PyTorch's attention, and how its variable-length attention is called: that runs on GPUs only, so a reference
replaces it here.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_cases import CHUNKS, chunk_inputs
from attention_oracle import reference_attention
from chunk_batches import chunk_batch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tgis.engines.kernels.attention_inputs import AttentionParams
from tgis.engines.kernels.cuda import varlen_prefill
from tgis.engines.kernels.cuda.varlen_prefill import is_supported
from tgis.engines.paged import attention

NEW = [(0, 40), (0, 2), (0, 16), (0, 17)]
MIXED = [(7, 30), (0, 5), (16, 2), (100, 33), (31, 17)]


class Varlen:
    """As torch documents and checks it: sequences begin at `cu_seq`, queries are the last tokens of a sequence."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **how: Any
    ) -> Tensor:
        self.calls += 1
        for ends, tensor, most in ((cu_q, query, max_q), (cu_k, key, max_k)):
            assert ends.dtype == torch.int32
            assert ends.is_contiguous()
            assert (ends[0], ends[-1]) == (0, len(tensor))
            assert ends.diff().max() == most
        assert value.shape == key.shape
        assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        left, right = how.pop("window_size", (-1, -1))
        assert right == 0 or (left, right) == (-1, -1)
        params = AttentionParams(how.pop("scale"), None if left < 0 else left + 1, causal=right == 0)
        assert how == varlen_prefill._GQA
        bounds = [[*pairwise(ends.tolist())] for ends in (cu_q, cu_k)]
        return torch.cat(
            [
                reference_attention(query[a:b], key[c:d], value[c:d], params)
                for (a, b), (c, d) in zip(*bounds, strict=True)
            ]
        )


@pytest.fixture(params=[{}, {"enable_gqa": True}], ids=["torch 2.11", "torch 2.13"])
def varlen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Varlen:
    fake = Varlen()
    monkeypatch.setattr(varlen_prefill, "varlen_attn", fake)
    monkeypatch.setattr(varlen_prefill, "_GQA", request.param)
    return fake


@pytest.mark.parametrize("rows", [NEW, MIXED])
@pytest.mark.parametrize(
    "params", [*(AttentionParams(0.3, window) for window in (None, 1, 20)), AttentionParams(0.3, causal=False)]
)
def test_the_chunks_of_a_step_are_one_call(
    varlen: Varlen, rows: list[tuple[int, int]], params: AttentionParams
) -> None:
    chunks = chunk_batch(rows, 4, 2, 16, torch.float32)
    arguments = chunks.batch, chunks.q, chunks.k, chunks.v, chunks.layer, params
    for backend in (attention._varlen_prefill, attention._torch_prefill):
        torch.testing.assert_close(
            torch.cat(backend(*arguments)).double(), chunks.expected(params), atol=1e-5, rtol=1e-5
        )
    assert varlen.calls == 1


@pytest.mark.parametrize("name", CHUNKS)
def test_plain_pytorch_matches_the_oracle(name: str) -> None:
    """Chunks, and their last tokens as decodes."""
    chunks, params = chunk_inputs(CHUNKS[name], "cpu")
    expected, batch, q = chunks.expected(params), chunks.batch, chunks.q
    tables = pad_sequence([chunk.block_table for chunk in batch.chunks], batch_first=True)
    decodes = replace(batch, block_tables=tables, seq_lens=torch.tensor([chunk.seq_len for chunk in batch.chunks]))
    last = torch.tensor([chunk.tokens.stop - 1 for chunk in batch.chunks])
    prefilled = torch.cat(attention._torch_prefill(batch, q, chunks.k, chunks.v, chunks.layer, params))
    decoded = attention._torch_decode(decodes, q[last], chunks.layer, params)
    for found, wanted in ((prefilled, expected), (decoded, expected[last - batch.num_decodes])):
        assert (found.double() - wanted).abs().max() < (1e-5 if q.dtype == torch.float32 else 5e-3)


def test_long_contexts_are_gathered_in_several_calls(varlen: Varlen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_prefill, "MAX_GATHERED_TOKENS", 60)
    chunks = chunk_batch(MIXED, 4, 2, 16, torch.float32)
    arguments = chunks.batch, chunks.q, chunks.k, chunks.v, chunks.layer, AttentionParams(0.3)
    outputs = attention._varlen_prefill(*arguments)
    torch.testing.assert_close(torch.cat(outputs).double(), chunks.expected(AttentionParams(0.3)), atol=1e-5, rtol=1e-5)
    lengths = [
        0 if group.context_slots is None else len(group.context_slots) for group in chunks.batch.varlen_batches or []
    ]
    assert lengths == [37 + 5 + 18, 133, 48]  # 133 is a single sequence
    assert varlen.calls == 3


@pytest.mark.parametrize(
    ("change", "rules", "supported"),
    [
        ({}, {}, True),
        ({"dtype": torch.float16}, {}, True),
        ({"size": 80}, {}, True),
        ({"dtype": torch.float32}, {}, False),
        ({"cache": torch.float16}, {}, False),
        ({"size": 20}, {}, False),
        ({"size": 264}, {}, False),
        ({"v_size": 64}, {}, False),
        ({}, {"softcap": 30.0}, False),
        ({}, {"sinks": torch.zeros(4)}, False),
        ({}, {"bias": torch.zeros(4, 32)}, False),
    ],
)
def test_unsupported_inputs_use_other_backends(
    change: dict[str, Any], rules: dict[str, Any], supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, size = change.get("dtype", torch.bfloat16), change.get("size", 128)
    q, params = torch.empty(3, 4, size, dtype=dtype), AttentionParams(1.0, **rules)
    cache, sizes = change.get("cache", dtype), (size, change.get("v_size", size))
    keys, values = (torch.empty(1, 16, 2, each, dtype=cache) for each in sizes)
    assert is_supported(q, keys, values, params) == supported
    assert attention._select_backends(q, (keys, values), params) is attention._TORCH_BACKENDS
    monkeypatch.setattr(attention, "has_kernels", lambda _device: True)
    write, decode, prefill = attention._select_backends(q, (keys, values), params)
    same = "cache" not in change
    other = attention._triton_prefill if same else attention._torch_prefill
    assert prefill is (attention._varlen_prefill if supported else other)
    assert decode is (attention._triton_decode if same else attention._torch_decode)
    assert write is (attention._triton_write if same else attention._torch_write)
