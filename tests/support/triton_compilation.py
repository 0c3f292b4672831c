"""Compiles the Triton kernels for GPUs on a machine without one. Prints one line of JSON: for each model and GPU the
bytes of shared memory, the number of asynchronous 16-byte copies to it, and of matrix multiply instructions.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import decode_cases
import filtered_cases
import gumbel_max_cases
import prefill_cases
import quantized_cases
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tgis.engines.kernels.attention_inputs import make_paged_chunks
from tgis.engines.kernels.cuda import kv_cache, paged_decode, paged_prefill, quantized, sampling
from tgis.engines.sampling import draws

KERNELS = {
    *(
        "_split_attention",
        "_combine_splits",
        "_prefill_attention",
        "_gumbel_max_block",
        "_filtered_draw",
        "_searched_draw",
        "_best_token",
    ),
    *("_write_token", "_product", "_round"),
}


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


class CompileOnlyKernel:
    """A kernel that is compiled when it is launched, and not run."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.binary: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.binary = self._kernel.warmup(*args, grid=grid, **kwargs)

        return launch


def build(module: Any, kernel: str, capability: int, run: Callable[[], object]) -> tuple[int, int, int]:
    """`run` launches the module's kernels; the numbers are those of one of them."""
    driver.set_active(FakeTritonDriver(capability))
    kernels = {name: value for name, value in vars(module).items() if name in KERNELS}
    compiled = {name: CompileOnlyKernel(value) for name, value in kernels.items()}
    vars(module).update(compiled)
    run()
    vars(module).update(kernels)
    code = compiled[kernel].binary.asm["ptx"]
    copies, products = (len(re.findall(word, code)) for word in ("cp.async.cg.shared", "mma.*sync"))
    return compiled[kernel].binary.metadata.shared, copies, products


def build_decode(case: decode_cases.Case, capability: int) -> tuple[int, int, int]:
    tensors, params = decode_cases.inputs(case, "cpu")
    run = partial(paged_decode.paged_decode, *tensors, params=params, num_sms=case.num_sms)
    return build(paged_decode, "_split_attention", capability, run)


def build_prefill(case: prefill_cases.Case, capability: int) -> tuple[int, int, int]:
    made, params = prefill_cases.inputs(case, "cpu")
    run = partial(paged_prefill.paged_prefill, made.q, *made.layer, make_paged_chunks(made.batch.chunks), params)
    return build(paged_prefill, "_prefill_attention", capability, run)


def build_draw(case: gumbel_max_cases.Case, capability: int) -> tuple[int, int, int]:
    scores, keys = gumbel_max_cases.inputs(case)
    run = partial(sampling.gumbel_max, scores.values, scores.max_score, scores.temperature, keys)
    return build(sampling, "_gumbel_max_block", capability, run)


def build_filtered_draw(name: str, case: filtered_cases.Case, capability: int) -> tuple[int, int, int]:
    run = partial(draws._triton_draw_filtered, *filtered_cases.inputs(case, "cpu"))
    return build(sampling, name, capability, run)


def build_argmax(capability: int) -> tuple[int, int, int]:
    logits = torch.zeros(2, 128256, dtype=torch.bfloat16)
    return build(sampling, "_best_token", capability, partial(sampling.best_token_table, logits))


def build_write(capability: int) -> tuple[int, int, int]:
    states, cache = torch.zeros(2, 8, 128, dtype=torch.bfloat16), torch.zeros(1, 16, 8, 128, dtype=torch.bfloat16)
    slots = torch.zeros(2, dtype=torch.int64)
    run = partial(kv_cache.write_kv_cache, states, states, cache, cache, slots)
    return build(kv_cache, "_write_token", capability, run)


def build_product(name: str, rows: int, capability: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Of a layer as wide as Llama's."""
    weight = quantized_cases.KINDS[name].weight(64, 4096)
    gemm, x = quantized.TritonGemm(weight, torch.device("cpu")), torch.zeros(rows, 4096, dtype=dtype)
    return build(quantized, "_product", capability, partial(gemm.quantized_product, x, None))


def main() -> None:
    decodes, prefills = decode_cases.BFLOAT16, prefill_cases.BFLOAT16
    builds = {name: build_decode(decodes[name], 90) for name in ("Llama", "StarCoder", "GPT-OSS")}
    builds["Gemma on sm_86"] = build_decode(decodes["Gemma"], 86)
    builds |= {f"{name}, prefill": build_prefill(case, 90) for name, case in prefills.items()}
    builds["Gemma on sm_86, prefill"] = build_prefill(prefills["Gemma"], 86)
    builds["a draw"] = build_draw(gumbel_max_cases.CASES["bfloat16"], 80)
    case = filtered_cases.CASES["top_k and top_p"]
    builds["a filtered draw"] = build_filtered_draw("_filtered_draw", case, 80)
    builds["a searched draw"] = build_filtered_draw("_searched_draw", case, 80)
    builds["an argmax"], builds["a write"] = build_argmax(80), build_write(80)
    for name, rows in (("int8", 1), ("int4, plain activations", 16), ("fp8 of 128", 64), ("int4 of 128 in order", 512)):
        for capability in (86, 90):
            builds[f"{name}, {rows} rows on sm_{capability}"] = build_product(name, rows, capability, torch.bfloat16)
    print(json.dumps(builds))


if __name__ == "__main__":
    main()
