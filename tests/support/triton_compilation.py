"""Compiles the Triton kernels for GPUs on a machine without one. Prints one line of JSON: for each model and GPU the
bytes of shared memory, the number of asynchronous 16-byte copies to it, and of matrix multiply instructions.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import filtered_cases
import gumbel_max_cases
import quantized_cases
import torch
from attention_cases import BFLOAT16_CHUNKS, BFLOAT16_DECODES, chunk_inputs, decode_inputs
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tgis.engines.kernels.cuda import kv_cache, paged_decode, paged_prefill, quantized, sampling
from tgis.engines.sampling import draws

PRODUCTS = ("int8", 1), ("int4, plain activations", 16), ("fp8 of 128", 64), ("int4 of 128 in order", 512)


class FakeTritonDriver:
    """As much of Triton's driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # compiled kernels are cached by device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def build(kernel: str, capability: int, launch: Callable[[], object]) -> tuple[int, int, int]:
    """The numbers of one of the kernels that are launched, which are only compiled."""
    binaries, run = dict[str, Any](), JITFunction.run

    def compile_only(function: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> None:
        binaries[function.__name__] = run(function, *args, warmup=True, **kwargs)

    driver.set_active(FakeTritonDriver(capability))
    JITFunction.run = compile_only
    launch()
    JITFunction.run = run
    copies, products = (
        len(re.findall(word, binaries[kernel].asm["ptx"])) for word in ("cp.async.cg.shared", "mma.*sync")
    )
    return binaries[kernel].metadata.shared, copies, products


def decode(name: str) -> None:
    tensors, params = decode_inputs(BFLOAT16_DECODES[name], "cpu")
    paged_decode.paged_decode(*tensors, params=params, num_sms=132)


def prefill(name: str) -> None:
    made, params = chunk_inputs(BFLOAT16_CHUNKS[name], "cpu")
    paged_prefill.paged_prefill(*made.prefill_inputs(), params)


def draw() -> None:
    scores, keys = gumbel_max_cases.inputs(gumbel_max_cases.CASES["bfloat16"])
    sampling.gumbel_max(scores.values, scores.max_score, scores.temperature, keys)


def filtered_draw() -> None:
    draws._triton_draw_filtered(*filtered_cases.inputs(filtered_cases.CASES["top_k and top_p"], "cpu"))


def write() -> None:
    states, cache = torch.zeros(2, 8, 128, dtype=torch.bfloat16), torch.zeros(1, 16, 8, 128, dtype=torch.bfloat16)
    kv_cache.write_kv_cache(states, states, cache, cache, torch.zeros(2, dtype=torch.int64))


def product(name: str, rows: int) -> None:
    """Of a layer as wide as Llama's."""
    gemm = quantized.TritonGemm(quantized_cases.KINDS[name].weight(64, 4096), torch.device("cpu"))
    gemm.quantized_product(torch.zeros(rows, 4096, dtype=torch.bfloat16), None)


def main() -> None:
    builds = {
        "a draw": build("_gumbel_max_block", 80, draw),
        "a filtered draw": build("_filtered_draw", 80, filtered_draw),
        "an argmax": build("_best_token", 80, lambda: sampling.best_token_table(torch.zeros(2, 128256).bfloat16())),
        "a write": build("_write_token", 80, write),
    }
    for name, capability in (("Llama", 90), ("StarCoder", 90), ("GPT-OSS", 90), ("Gemma", 86)):
        builds[f"{name} on sm_{capability}"] = build("_split_attention", capability, partial(decode, name))
    for name, capability in (*((name, 90) for name in BFLOAT16_CHUNKS), ("Gemma", 86)):
        builds[f"{name} on sm_{capability}, prefill"] = build("_prefill_attention", capability, partial(prefill, name))
    for name, rows in PRODUCTS:
        for capability in (86, 90):
            launch = partial(product, name, rows)
            builds[f"{name}, {rows} rows on sm_{capability}"] = build("_product", capability, launch)
    print(json.dumps(builds))


if __name__ == "__main__":
    main()
