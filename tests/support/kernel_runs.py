"""Runs every function of a library of C kernels with random shapes and compares it with plain PyTorch in float64.

`python kernel_runs.py ISA LIBRARY SEED RUNS` prints how often each function ran; `test_sanitizers.py` starts it with a
library that checks its own memory accesses. With RUNS 0 it makes one access out of bounds instead.
"""

import ctypes
import random
import sys
from collections import Counter
from dataclasses import replace

import torch
from attention_oracle import random_bias, reference_attention
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tgis.engines.kernels.attention_inputs import AttentionParams
from tgis.engines.kernels.cpu.attention import CpuAttention
from tgis.engines.kernels.cpu.fused_ops import ACTIVATIONS, GatedMlp, Norm, NormFormula, RotaryEmbedding
from tgis.engines.kernels.cpu.gemm import CpuGemm
from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.quantized import QuantizedGemm, stored
from tgis.engines.kernels.cpu.recording import Recorder
from tgis.engines.kernels.cpu.sampling import CpuArgmax, CpuGumbelMax
from tgis.engines.kernels.kv_codes import CODES, dequantize
from tgis.engines.kernels.kv_codes import quantize as to_codes
from tgis.engines.quantization.weight import E4M3, INT4, INT8, NF4, ActivationCodes, QuantizedWeight
from tgis.engines.sampling import draws
from tgis.engines.sampling.logits_processors import Scores

ERROR = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def run_attention(kernels: CpuKernels, draw: random.Random, dtype: torch.dtype) -> None:
    """Sequences with any number of cached and new tokens; what no query may read is NaN, and not in the cache."""
    attention, block = CpuAttention(kernels), draw.choice([16, 32, 48])
    kv_heads, group = draw.randint(1, 4), draw.choice([1, 1, 2, 3, 7, 48])
    k_size, v_size = (16 * draw.choice([1, 1, 2, 3, 5, 8]) for _ in range(2))
    sequences = [(draw.choice([0, draw.randint(1, 700)]), draw.randint(1, 60)) for _ in range(draw.randint(1, 5))]
    causal = draw.random() < 0.7
    window = draw.choice([None, None, 1, draw.randint(2, 600)]) if causal else None
    sinks = torch.randn(kv_heads * group) if draw.random() < 0.3 else None
    longest, heads = max(map(sum, sequences)), kv_heads * group
    by_distance = draw.random() < 0.5
    bias = random_bias(heads, longest, by_distance=by_distance, causal=causal) if draw.random() < 0.3 else {}
    params = AttentionParams(k_size**-0.5, window, draw.choice([None, None, 5.0]), sinks, **bias, causal=causal)
    widths = [-(-(before + new) // block) for before, new in sequences]
    tables = torch.randperm(sum(widths)).split(widths)
    codes = draw.choice([None, None, *CODES.values()])
    caches = [torch.full((sum(widths), block, kv_heads, size), torch.nan).to(dtype) for size in (k_size, v_size)]
    if codes:
        caches = [
            torch.full((*each.shape[:3], each.shape[3] + 4), 255, dtype=torch.uint8).view(codes) for each in caches
        ]
        params = replace(params, key_scales=torch.randint(-3, 4, (kv_heads, k_size)).exp2())
    total = sum(new for _, new in sequences)
    q = torch.randn(total, kv_heads * group, k_size).to(dtype)
    rows, expected, start = [], [], 0
    for (before, new), table in zip(sequences, tables, strict=True):
        states = [torch.randn(before + new, kv_heads, size).to(dtype) for size in (k_size, v_size)]
        places = torch.arange(before + new)
        attention.write_kv_cache(
            *(states[0], states[1], caches[0], caches[1], table[places // block] * block + places % block),
            params.key_scales,
        )
        if codes:
            states[0] = dequantize(to_codes(states[0] / params.key_scales, codes), torch.float64) * params.key_scales
            states[1] = dequantize(to_codes(states[1], codes), torch.float64)
        rows.append([start, new, before + new, table.data_ptr()])
        expected.append(reference_attention(q[start : start + new], states[0], states[1], params))
        start += new
    found = attention.attend(q, caches[0], caches[1], torch.tensor(rows), params)
    assert_close(found, torch.cat(expected), dtype)


def run_norm(kernels: CpuKernels, draw: random.Random, dtype: torch.dtype) -> None:
    size, centered = draw.randint(1, 700), draw.random() < 0.5
    formula = NormFormula(1e-6, draw.choice([0.0, 1.0]), centered)
    norm = nn.LayerNorm(size, bias=draw.random() < 0.5, elementwise_affine=draw.random() < 0.8).to(dtype)
    for parameter in norm.parameters():
        parameter.copy_(torch.randn(size))
    x = torch.randn(draw.randint(0, 60), size).to(dtype)
    parameters = (None if each is None else each.double() for each in (norm.weight, norm.bias))
    assert_close(Norm(norm, formula, kernels)(x), formula(x.double(), *parameters), dtype)


def run_rotary(kernels: CpuKernels, draw: random.Random, dtype: torch.dtype) -> None:
    batch, tokens, size, rest = draw.randint(1, 3), draw.randint(1, 60), 2 * draw.randint(1, 70), draw.randint(0, 20)
    q, k = (torch.randn(batch, draw.randint(1, 9), tokens, size + rest).to(dtype) for _ in range(2))
    cos, sin = torch.randn(2, draw.choice([1, batch]), tokens, size).to(dtype)
    for x, found in zip((q, k), RotaryEmbedding(apply_rotary_pos_emb, kernels)(q, k, cos, sin), strict=True):
        first, second = x[..., :size].double().chunk(2, -1)
        turned = torch.cat([-second, first], -1) * sin.double()[:, None]
        expected = torch.cat([x[..., :size].double() * cos.double()[:, None] + turned, x[..., size:].double()], -1)
        assert_close(found, expected, dtype)


def run_gated_mlp(kernels: CpuKernels, draw: random.Random, dtype: torch.dtype) -> None:
    """Run the gated MLP on columns of a wider product."""
    size, kind = draw.randint(1, 500), draw.choice(list(ACTIVATIONS))
    mlp = nn.Module()
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (nn.Identity() for _ in range(3))
    gate, up = (4 * torch.randn(draw.randint(0, 60), 2 * size)).to(dtype).split(size, -1)
    mlp.gate_proj.forward, mlp.up_proj.forward = lambda _: gate, lambda _: up
    expected = ACTIVATIONS[kind](gate.double()) * up.double()
    assert_close(GatedMlp(mlp, kind, kernels)(gate), expected, dtype)


def run_recording(kernels: CpuKernels, draw: random.Random, dtype: torch.dtype) -> None:
    """Contiguous numbers, and strided and repeated ones, which are copied, too."""
    x, y = torch.randn(2, draw.randint(1, 40000)).to(dtype)
    a = torch.randn(draw.randint(1, 5), draw.randint(1, 9), draw.randint(1, 7), draw.randint(2, 99)).to(dtype)
    half, column = a.shape[3] // 2, a[:1, :, :, :1]

    def run() -> Tensor:
        turned = torch.cat([-a[..., half:], a[..., :half]], -1).transpose(1, 2)
        strided = (turned * 0.3).contiguous() - a.transpose(1, 2).contiguous() / 7 * column.transpose(1, 2)
        return torch.cat([x * y + y, strided.flatten()])

    with torch.inference_mode():
        replay, output = Recorder(kernels).record(run)
        x.copy_(torch.randn(x.shape))
        a.copy_(torch.randn(a.shape))
        replay()
        assert torch.equal(output, run())
        assert replay.operators.keys() <= {"aten.mul.Tensor"}, replay.operators  # whose result is not contiguous


def run_gemm(kernels: CpuKernels, draw: random.Random, dtype: torch.dtype) -> None:
    inputs, outputs = 2 * draw.randint(1, 300), draw.randint(1, 200)
    weight = torch.randn(outputs, inputs).div(inputs**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if draw.random() < 0.5 else None
    x = torch.randn(draw.choice([0, 1, draw.randint(2, 200)]), inputs).to(dtype)
    expected = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(CpuGemm(weight, kernels)(x, bias), expected, dtype)


def run_quantized(kernels: CpuKernels, draw: random.Random, dtype: torch.dtype) -> None:
    inputs, outputs = draw.randint(1, 300), draw.randint(1, 200)
    table, size = draw.choice([INT4, INT8, NF4, E4M3]), draw.choice([None, 16, 32, 80, 128])
    codes = torch.randint(120, (outputs, inputs)).remainder(len(table)).to(torch.uint8)
    scale, offset = (torch.randn(2, outputs, -(-inputs // (size or inputs))) / table[:120].abs().max()).to(
        draw.choice(list(ERROR))
    )
    order = torch.randperm(inputs) if draw.random() < 0.3 else None
    whole = ActivationCodes(per_group=False, steps=127.5), ActivationCodes(scale=0.02)
    weight = QuantizedWeight(codes, table, scale, offset if draw.random() < 0.5 else None, size, order)
    bias = torch.randn(outputs).to(dtype) if draw.random() < 0.5 else None
    x = torch.randn(draw.choice([0, 1, draw.randint(2, 200)]), inputs).to(dtype)
    for activations in (None, ActivationCodes(), *whole) if weight.has_integers else (None,):
        weight = replace(weight, activations=activations)
        expected = nn.functional.linear(
            weight.numbers(x).double(), weight.dequantized().double(), None if bias is None else bias.double()
        )
        y = QuantizedGemm(stored(weight), kernels, dtype)(x, bias)
        assert_close(y / inputs**0.5, expected / inputs**0.5, dtype)


def run_gumbel_max(kernels: CpuKernels, draw: random.Random, dtype: torch.dtype) -> None:
    rows, vocab_size = draw.choice([0, 1, draw.randint(2, 9)]), draw.randint(1, 3000)
    values = (torch.randn(rows, vocab_size) * draw.choice([0.1, 3, 300])).to(dtype)
    temperature = torch.full((rows, 1), draw.choice([1e-30, 0.5, 100.0]), dtype=torch.float64)
    scores = Scores(values, values.amax(-1, keepdim=True).float(), temperature)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows, 1))
    found = CpuGumbelMax(kernels)(values, scores.max_score, temperature, keys)
    assert found.tolist() == (draws.draw(scores, keys).tolist() if rows else [])


def run_argmax(kernels: CpuKernels, draw: random.Random, dtype: torch.dtype) -> None:
    """Run argmax on scores with ties."""
    values = (torch.randn(draw.randint(0, 9), draw.randint(1, 3000)) * draw.choice([0.1, 300])).round().to(dtype)
    best = values.amax(-1, keepdim=True) if len(values) else values
    expected = (values == best).int().argmax(-1).tolist() if len(values) else []
    assert CpuArgmax(kernels)(values, details=False).tolist() == [[token, 0, 0, 0, 0] for token in expected]
    if len(values):
        logprobs = values.double().log_softmax(-1).amax(-1)
        assert_close(CpuArgmax(kernels)(values, details=True)[:, 2].to(dtype), logprobs, dtype)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert found.shape == expected.shape
    if found.numel():
        difference = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1)
        assert difference < ERROR[dtype], (difference, found.shape)  # NaN fails, too


def overrun(kernels: CpuKernels) -> None:
    """Write to the slot after the last of a cache."""
    k, cache = torch.zeros(1, 1, 16), torch.zeros(2, 4, 1, 16)
    CpuAttention(kernels).write_kv_cache(k, k, cache, cache, torch.tensor([8]))


RUNS = [
    run_attention,
    run_norm,
    run_rotary,
    run_gated_mlp,
    run_recording,
    run_gemm,
    run_quantized,
    run_gumbel_max,
    run_argmax,
]


def main() -> None:
    isa, path, seed, runs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    kernels, draw = CpuKernels(isa, ctypes.CDLL(path)), random.Random(seed)
    torch.manual_seed(seed)
    torch.set_grad_enabled(False)
    if not runs:
        overrun(kernels)
    counts: Counter[str] = Counter()
    for _ in range(runs):
        torch.set_num_threads(draw.choice([1, 2, 3]))
        run = draw.choice(RUNS)
        run(kernels, draw, draw.choice(list(ERROR)))
        counts[run.__name__] += 1
    print(dict(counts))


if __name__ == "__main__":
    main()
