"""`python -m benchmarks.attention_time`: the speed of attention over the paged KV cache on this machine's GPU.

Decode in GB/s of keys and values read, prefill in TFLOP/s, beside the GPU's own copy and matrix multiply.
A case runs in a CUDA graph, over the KV caches of enough layers to overflow the L2 cache. The last line is JSON.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams, PrefillChunk
from tgis.engines.kernels.cuda.varlen_prefill import make_varlen_batches, varlen_prefill
from tgis.engines.paged.attention_metadata import AttentionMetadata

BLOCK, REPEATS = 16, 20
_WARM_SECONDS = 0.2  # replays before the measurement: an idle GPU has a low clock
_MEASURED_SECONDS = 0.1  # at least
_BEYOND_CACHE = 1 << 29  # bytes


@dataclass(frozen=True)
class Shape:
    """The attention of a model; the defaults are those of Llama-3.1-8B."""

    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    window: int | None = None


def _mixed(rows: int) -> list[int]:
    draw = random.Random(1)
    return [max(1, int(draw.lognormvariate(6, 0.8))) for _ in range(rows)]


DECODES: dict[str, tuple[list[int], Shape]] = {
    **{f"{rows} x {length}": ([length] * rows, Shape()) for rows in (1, 8, 64, 256) for length in (512, 4096)},
    "1 x 131072": ([131072], Shape()),
    "256 x 256": ([256] * 256, Shape()),
    "256 log-normal around 400": (_mixed(256), Shape()),
    "255 x 512, 1 x 65536": ([512] * 255 + [65536], Shape()),
    "64 x 4096, window 1024": ([4096] * 64, Shape(window=1024)),
    "256 x 512, 9 heads of 64, 3 KV heads": ([512] * 256, Shape(9, 3, 64)),
    "256 x 512, 32 heads of 80": ([512] * 256, Shape(32, 32, 80)),
    "256 x 512, 48 heads, 1 KV head": ([512] * 256, Shape(48, 1)),
    "256 x 512, 16 heads of 256, 8 KV heads": ([512] * 256, Shape(16, 8, 256)),
}
PREFILLS: dict[str, tuple[int, int, int]] = {  # sequences, cached tokens, new tokens
    "16 x 512": (16, 0, 512),
    "4 x 2048": (4, 0, 2048),
    "1 x 8192": (1, 0, 8192),
    "4 x 1024 after 7168": (4, 7168, 1024),
    "256 x 32 after 1000": (256, 1000, 32),
}
CAPPED_PREFILLS = ("4 x 2048", "4 x 1024 after 7168")  # also with a soft cap, by the kernel in Triton


def seconds(action: Callable[[int], object], layers: int) -> float:
    """Seconds of one call: the median over replays of a graph that calls it once for each layer."""
    action(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            action(layer)
    warm = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < warm:
        _replay_seconds(graph)
    times: list[float] = []
    while len(times) < REPEATS or sum(times) < _MEASURED_SECONDS:
        times.append(_replay_seconds(graph))
    return statistics.median(times) / layers


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000


def decode(lengths: list[int], shape: Shape) -> dict[str, float]:
    """Time of one decode step's attention in microseconds, and GB/s of keys and values read."""
    from tgis.engines.kernels.cuda.paged_decode import paged_decode  # noqa: PLC0415 - Triton comes with torch for CUDA only

    per_token = 4 * shape.kv_heads * shape.size
    read = sum(min(length, shape.window or length) for length in lengths) * per_token
    widths = [-(-length // BLOCK) for length in lengths]
    layers = _layers(sum(widths), shape, min(64, max(2, _BEYOND_CACHE // read)))
    tables = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
    for row, blocks in enumerate(torch.randperm(sum(widths)).int().split(widths)):
        tables[row, : len(blocks)] = blocks
    tables = tables.cuda()
    counts = torch.tensor(lengths, dtype=torch.int32).cuda()
    q = _random(len(lengths), shape.heads, shape.size)
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def run(layer: int) -> Tensor:
        return paged_decode(
            q,
            *layers[layer],
            tables,
            counts,
            params=AttentionParams(shape.size**-0.5, shape.window),
            num_sms=processors,
        )

    taken = seconds(run, len(layers))
    return {"us": round(taken * 1e6, 1), "gb_s": round(read / taken / 1e9)}


def prefill(rows: int, before: int, count: int, softcap: float | None = None) -> dict[str, float]:
    """Time of prefill attention in milliseconds, and TFLOP/s of causal attention."""
    from tgis.engines.kernels.cuda.paged_prefill import paged_prefill  # noqa: PLC0415 - as above

    shape, width = Shape(), -(-(before + count) // BLOCK)
    layers = _layers(rows * width, shape, 2)
    blocks = torch.randperm(rows * width).cuda().split(width)
    chunks = [PrefillChunk(slice(row * count, (row + 1) * count), before, own) for row, own in enumerate(blocks)]
    batches, nothing = make_varlen_batches(chunks, BLOCK), torch.empty(0, dtype=torch.int64, device="cuda")
    sequences = AttentionMetadata(nothing, nothing[:, None], nothing, chunks).chunk_sequences
    params = AttentionParams(shape.size**-0.5, softcap=softcap)
    q, k, v = (_random(rows * count, heads, shape.size) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))

    def run(layer: int) -> list[Tensor]:
        if softcap is not None:
            return [paged_prefill(q, *layers[layer], sequences, count, params)]
        return varlen_prefill(q, k, v, layers[layer], batches, params)

    taken = seconds(run, len(layers))
    pairs = rows * sum(range(before + 1, before + count + 1))
    return {"ms": round(taken * 1e3, 3), "tflop_s": round(4 * shape.heads * shape.size * pairs / taken / 1e12, 1)}


def machine() -> dict[str, object]:
    """The GPU's name, copy bandwidth and matrix multiply rate."""
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    left, right = _random(8192, 8192), _random(8192, 8192)
    return {
        "name": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gb_s": round(2 * len(source) / seconds(lambda _layer: target.copy_(source), 4) / 1e9),
        "product_tflop_s": round(2 * 8192**3 / seconds(lambda _layer: left @ right, 4) / 1e12),
    }


def main() -> int:
    """Measure all cases; exit code 1 without a GPU."""
    if not torch.cuda.is_available():
        print("attention_time: needs a CUDA device, and this machine has none", file=sys.stderr)
        return 1
    torch.set_grad_enabled(False)
    report = {
        "machine": machine(),
        "decode": {name: shown(name, decode(*case)) for name, case in DECODES.items()},
        "prefill": {name: shown(name, prefill(*case)) for name, case in PREFILLS.items()},
        "prefill with a soft cap": {name: shown(name, prefill(*PREFILLS[name], 50.0)) for name in CAPPED_PREFILLS},
    }
    print(json.dumps(report))
    return 0


def shown(name: str, figures: dict[str, float]) -> dict[str, float]:
    print(f"{name:<44}", *(f"{value} {unit}" for unit, value in figures.items()), flush=True)
    return figures


def _layers(blocks: int, shape: Shape, count: int) -> list[tuple[Tensor, Tensor]]:
    size = blocks, BLOCK, shape.kv_heads, shape.size
    return [(_random(*size), _random(*size)) for _ in range(count)]


def _random(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    sys.exit(main())
