"""The C kernel of attention against the oracle, for every instruction set."""

from dataclasses import replace

import attention_cases
import pytest
import torch
from attention_cases import BFLOAT16_DECODES, Case, chunk_inputs, decode_inputs, expected_decodes
from chunk_batches import ChunkedBatch, chunk_batch
from cpu_kernels import kernels_here, num_threads, of_each_isa
from slow_cases import slow_except
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams
from tgis.engines.kernels.cpu.attention import CpuAttention
from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.kv_codes import SCALE_BYTES, channel_scales, dequantize, quantize
from tgis.engines.paged.attention_metadata import AttentionMetadata


def fitting(cases: dict[str, Case]) -> dict[str, Case]:
    """Those with sizes that the kernel supports."""
    sizes = {name: (case.k_size, case.v_size or 16, case.block) for name, case in cases.items()}
    return {name: case for name, case in cases.items() if not any(size % 16 for size in sizes[name])}


DECODES, CHUNKS = fitting(attention_cases.DECODES), fitting(attention_cases.CHUNKS)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ROWS = [(0, 2), (0, 16), (0, 130), (127, 2), (126, 5), (509, 7), (1000, 33), (15, 64)]  # tokens before, new tokens
TOTAL = 1300
PLAIN = Case([(0, TOTAL)], 6, 2, 32)
ALL_AT_ONCE = replace(PLAIN, window=70, softcap=3.0, sinks=True, bias="distance")


kernels = of_each_isa


@pytest.fixture
def kernel(kernels: CpuKernels) -> CpuAttention:
    return CpuAttention(kernels)


def in_panels(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """A cache [blocks, block size, heads, head size] in the order of attention_tile.h."""
    pair = 2 if keys.dtype == torch.bfloat16 else 1
    k = keys.unflatten(-1, (-1, pair)).unflatten(1, (-1, 16))  # [blocks, panels, tokens, heads, pairs, pair]
    v = values.unflatten(1, (-1, 16 // pair, pair))  # [blocks, panels, pairs, pair, heads, size]
    k, v = k.permute(0, 3, 1, 4, 2, 5), v.permute(0, 4, 1, 2, 5, 3)
    return k.reshape(keys.shape).contiguous(), v.reshape(values.shape).contiguous()


def decode_by(
    kernel: CpuAttention,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    params: AttentionParams,
) -> Tensor:
    """Attention of rows with one token each."""
    assert kernel.supports(q, keys, values)
    sequences = AttentionMetadata.decodes(tables, lengths).cpu_sequences
    return kernel.attend(q, *in_panels(keys, values), sequences, params)


def empty_codes(like: Tensor) -> Tensor:
    """A cache whose scales are NaN."""
    return torch.full((*like.shape[:3], like.shape[3] + SCALE_BYTES), -1, dtype=torch.int8)


def cache_of(
    kernel: CpuAttention, chunks: ChunkedBatch, *, coded: bool, key_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The cache of a batch as the kernel reads it."""
    keys, values = chunks.layer
    if not coded:
        return in_panels(keys, values)
    cache = empty_codes(keys), empty_codes(values)
    slots = torch.arange(len(keys) * keys.shape[1])
    kernel.write_kv_cache(keys.flatten(0, 1), values.flatten(0, 1), *cache, slots, key_scales)
    return cache


def stored_numbers(cache: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The numbers [blocks, block size, heads, head size] of a cache of keys or values, and their scales."""
    blocks, block, heads, row = cache.shape
    panels = cache.view(blocks, heads, block // 16, 16 * row)
    codes, scales = panels.split([16 * (row - SCALE_BYTES), 16 * SCALE_BYTES], -1)
    codes = codes.unflatten(-1, (-1, 16, 4) if kind == "keys" else (4, -1, 4))
    codes = codes.transpose(3, 4).flatten(4) if kind == "keys" else codes.transpose(4, 5).flatten(3, 4)
    scales = scales.contiguous().view(torch.float32).double()[..., None]
    found = codes.double() * scales  # [blocks, heads, panels, 16, head size]
    return tuple(each.flatten(2, 3).transpose(1, 2) for each in (found, scales))


def assert_nearest(found: Tensor, scales: Tensor, numbers: Tensor) -> None:
    """The largest number of a row has the largest code, and each number the nearest."""
    exact = numbers.double() / scales
    assert float((exact.abs().amax(-1) - 127).abs().max()) < 1e-3
    assert float((found / scales - exact).abs().max()) < 0.5 + 1e-3


def prefill_by(kernel: CpuAttention, chunks: ChunkedBatch, params: AttentionParams, *, coded: bool = False) -> Tensor:
    """Attention of the chunks of a batch."""
    cache = cache_of(kernel, chunks, coded=coded)
    assert kernel.supports(chunks.q, *cache)
    output = kernel.attend(chunks.q, *cache, chunks.batch.cpu_sequences, params)
    return output[chunks.batch.num_decodes :]


@pytest.mark.parametrize("name", [*DECODES, *BFLOAT16_DECODES])
def test_decodes_match_the_oracle(name: str) -> None:
    """Of all kernels that this CPU can run, for it takes long."""
    case = replace((DECODES | BFLOAT16_DECODES)[name], index=torch.int64)
    case = case if name in BFLOAT16_DECODES else replace(case, dtype=torch.float32)
    tensors, params = decode_inputs(case, "cpu")
    oracle = expected_decodes(*tensors, params=params)
    for kernels in kernels_here() if name in DECODES else kernels_here()[-1:]:
        found = decode_by(CpuAttention(kernels), *tensors, params=params).double()
        assert ((found - oracle).abs() < TOLERANCE[case.dtype]).all()  # and no NaN


SHAPES = [(1, 1, 16), (9, 3, 64), (7, 7, 80), (5, 1, 48), (14, 2, 256), (200, 1, 16), (2, 1, 512), (256, 1, 512)]
CHUNKS |= {f"{shape}": Case([(0, 40), (130, 3)], *shape) for shape in SHAPES}
FAST = {"a window that is longer than a span", "not causal", "all at once", *map(str, SHAPES[2:7])}


@pytest.mark.parametrize("name", slow_except(FAST, CHUNKS))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_chunks_see_their_context_and_themselves(name: str, dtype: torch.dtype) -> None:
    chunks, params = chunk_inputs(replace(CHUNKS[name], dtype=dtype), "cpu")
    oracle = chunks.expected(params)
    for kernels in kernels_here():
        found = prefill_by(CpuAttention(kernels), chunks, params).double()
        assert ((found - oracle).abs() < TOLERANCE[dtype]).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_new_keys_and_values_go_to_their_slots_and_nowhere_else(kernel: CpuAttention, dtype: torch.dtype) -> None:
    keys, values = torch.randn(5, 32, 3, 16).to(dtype), torch.randn(5, 32, 3, 48).to(dtype)
    k, v = torch.randn(1, 3, 40, 16).to(dtype)[0].transpose(0, 1), torch.randn(40, 3, 48).to(dtype)
    slots, cache = torch.randperm(5 * 32)[:40], in_panels(keys, values)
    for stored, new in zip((keys, values), (k, v), strict=True):
        stored.flatten(0, 1)[slots] = new
    kernel.write_kv_cache(k, v, *cache, slots)
    assert all(map(torch.equal, cache, in_panels(keys, values)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "v_size", "dtype"),
    [(6, 2, 32, 48, torch.float32), (9, 3, 64, 64, torch.bfloat16), (5, 1, 256, 16, torch.float32)],
)
def test_codes_give_attention_over_the_nearest_numbers(
    kernel: CpuAttention, heads: int, kv_heads: int, size: int, v_size: int, dtype: torch.dtype
) -> None:
    """Some channels of keys are 60 times as large as others, and those of queries as much smaller."""
    chunks = chunk_batch(ROWS, heads, kv_heads, size, dtype, v_size=v_size)
    factor = torch.where(torch.arange(size) % 8 == 3, 60, 1).to(dtype)
    chunks.q /= factor
    chunks.layer[0].mul_(factor)
    scales = channel_scales(chunks.layer[0].flatten(0, 1).transpose(0, 1))
    cache, tables = cache_of(kernel, chunks, coded=True, key_scales=scales), chunks.batch.cpu_sequences
    params = AttentionParams(size**-0.5, 600, 30.0, torch.linspace(-2, 2, heads), key_scales=scales)
    found = kernel.attend(chunks.q, *cache, tables, params)[chunks.batch.num_decodes :]
    stored, exact = [], (chunks.layer[0].double() / scales, chunks.layer[1])
    for each, numbers, kind in zip(cache, exact, ("keys", "values"), strict=True):
        numbers_found, scales_found = stored_numbers(each, kind)
        assert_nearest(numbers_found, scales_found, numbers)
        stored.append(numbers_found)
    chunks.set_contexts(stored[0] * scales, stored[1])
    assert float((found.double() - chunks.expected(params)).abs().max()) < 2 * TOLERANCE[dtype]
    chunks.set_contexts(*chunks.layer)
    exact_output = chunks.expected(params)
    lost = (found.double() - exact_output).norm() / exact_output.norm()
    assert float(lost) < 0.02


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_codes_of_a_token_depend_on_no_other_token(kernels: CpuKernels, dtype: torch.dtype) -> None:
    kernel = CpuAttention(kernels)
    states = torch.randn(40, 3, 16).to(dtype), torch.randn(40, 3, 48).to(dtype)
    states[0][7] = states[1][9, 1] = 0
    states[0][5] = states[1][3, 1] = 1e-31  # which counts as 0
    slots, caches = torch.randperm(5 * 32)[:40], []
    for parts in ([range(40)], [[n] for n in range(40)], [range(20, 40), range(20)]):
        caches.append([torch.zeros(5, 32, 3, each.shape[2] + SCALE_BYTES, dtype=torch.int8) for each in states])
        for part in parts:
            k, v = (each[part] for each in states)
            keys, values = caches[-1]
            kernel.write_kv_cache(k, v, keys, values, slots[part])
    assert all(torch.equal(*each) for others in caches[1:] for each in zip(caches[0], others, strict=True))
    for stored, numbers, kind in zip(caches[0], states, ("keys", "values"), strict=True):  # as PyTorch quantizes them
        found = stored_numbers(stored, kind)[0].flatten(0, 1)[slots]
        same = torch.equal(found.float(), dequantize(quantize(numbers), torch.float32))
        assert same or kernels.isa == "generic"  # it has no instruction that multiplies and adds
    written = [int(each.count_nonzero()) for each in caches[0]]
    assert all(0.9 * 40 * 3 * size < count <= 40 * 3 * size for count, size in zip(written, (20, 52), strict=True))


@pytest.mark.parametrize(
    ("case", "dtype", "coded"),
    [
        (PLAIN, torch.float32, False),
        (ALL_AT_ONCE, torch.bfloat16, False),
        (ALL_AT_ONCE, torch.float32, True),
        (PLAIN, torch.bfloat16, True),
    ],
)
def test_a_token_gets_the_same_bits_in_any_chunk_and_company(
    kernel: CpuAttention, case: Case, dtype: torch.dtype, *, coded: bool
) -> None:
    """However a prompt is cut, by however many threads, and beside whomever."""
    chunks, params = chunk_inputs(replace(case, dtype=dtype), "cpu")
    whole, blocks = prefill_by(kernel, chunks, params, coded=coded), chunks.batch.chunks[0].block_table
    cache = cache_of(kernel, chunks, coded=coded)
    cuts = ([1, 1, 14, 1, 240, 255, 1, 511, 276], [130] * 10, [1024, 276], [37] * 35 + [5])
    for count, cut in zip((1, 2, 7, 2), cuts, strict=True):
        assert sum(cut) == TOTAL
        parts, before = [], 0
        for size in cut:
            start = 2 + before
            rows = [[0, 1, 1, blocks.data_ptr()], [start, size, before + size, blocks.data_ptr()]][before % 2 :]
            with num_threads(count):
                output = kernel.attend(chunks.q, *cache, torch.tensor(rows), params)
            parts.append(output[start : start + size])
            before += size
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("bias", "dtype"), [(None, torch.bfloat16), ("distance", torch.float32)])
def test_a_token_that_sees_all_gets_the_same_bits_beside_any_others(
    kernel: CpuAttention, bias: str | None, dtype: torch.dtype
) -> None:
    """In a step of its whole sequence and of the last tokens alone; the last one of all decodes."""
    chunks, params = chunk_inputs(replace(PLAIN, bias=bias, dtype=dtype, causal=False), "cpu")
    whole, blocks = prefill_by(kernel, chunks, params), chunks.batch.chunks[0].block_table
    for threads, count in ((1, 1), (2, 1), (7, 40), (3, 700), (2, TOTAL)):
        rows = [[0, 1, 1, blocks.data_ptr()], [2 + TOTAL - count, count, TOTAL, blocks.data_ptr()]]
        with num_threads(threads):
            output = kernel.attend(chunks.q, *in_panels(*chunks.layer), torch.tensor(rows), params)
        assert torch.equal(output[2 + TOTAL - count :], whole[-count:]), count


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_nan_in_a_chunk_is_seen_by_later_tokens(kernel: CpuAttention, dtype: torch.dtype, *, coded: bool) -> None:
    chunks = chunk_batch([(0, 40), (0, 20)], 4, 2, 16, dtype)
    slot = chunks.batch.chunks[0].block_table[1], 5  # token 21
    chunks.layer[0][slot][:, 3] = float("nan")
    output = prefill_by(kernel, chunks, AttentionParams(0.3), coded=coded)
    assert output[:21].isfinite().all()
    assert output[21:40].isnan().all()
    assert output[40:].isfinite().all()


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_nothing_unwritten_is_read(kernel: CpuAttention, dtype: torch.dtype, *, coded: bool) -> None:
    chunks = chunk_batch([(600, 21)], 4, 2, 16, dtype)
    (chunk,) = chunks.batch.chunks
    for states in chunks.layer:
        states[chunk.block_table[-1], (600 + 21) % 16 :] = float("nan")
        states[chunk.block_table[:30]] = float("nan")
    chunk.block_table[:30] = 2**30
    params = AttentionParams(0.3, 100)
    assert prefill_by(kernel, chunks, params, coded=coded).isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_large_scores_do_not_overflow(kernel: CpuAttention, dtype: torch.dtype) -> None:
    tensors, params = decode_inputs(Case([50], dtype=dtype), "cpu")
    tensors[0] *= 1e4
    assert decode_by(kernel, *tensors, params=params).isfinite().all()
    chunks = chunk_batch([(600, 20)], 4, 2, 16, dtype)
    chunks.q *= 1e4
    assert prefill_by(kernel, chunks, AttentionParams(0.3)).isfinite().all()


def test_queries_of_any_strides(kernel: CpuAttention) -> None:
    chunks = chunk_batch([(20, 30)], 4, 2, 16, torch.float32)
    expected = prefill_by(kernel, chunks, AttentionParams(0.3))
    for dims in ((1, 0, 2), (2, 1, 0)):  # heads first; numbers apart
        chunks.q = chunks.q.permute(dims).contiguous().permute(dims)
        assert torch.equal(prefill_by(kernel, chunks, AttentionParams(0.3)), expected)


@pytest.mark.parametrize(
    "case",
    [
        *(Case([5], *sizes) for sizes in ((4, 1, 24), (4, 1, 528), (257, 1, 16), (4, 1, 16, 24))),
        *(Case([5], dtype=dtype) for dtype in (torch.float64, torch.float16)),
        *(Case([5], block=block) for block in (8, 24)),  # of whole panels
    ],
)
def test_other_shapes_and_dtypes_are_not_supported(case: Case) -> None:
    (q, keys, values, *_), _ = decode_inputs(case, "cpu")
    assert not CpuAttention.supports(q, keys, values)
