"""Compiles decode attention for GPUs on a machine without one. Prints one line of JSON: for each model and GPU
the bytes of shared memory, the number of asynchronous 16-byte copies to it, and of matrix multiply instructions.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from decode_cases import BFLOAT16, Case, inputs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tgis.engines.kernels.cuda import paged_decode as module


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


def build(case: Case, capability: int) -> tuple[int, int, int]:
    driver.set_active(FakeTritonDriver(capability))
    kernels = module._split_attention, module._combine_splits
    module._split_attention, module._combine_splits = attend, _ = [CompileOnlyKernel(kernel) for kernel in kernels]
    tensors, rules = inputs(case, "cpu")
    module.paged_decode(*tensors, params=rules, num_sms=case.num_sms)
    module._split_attention, module._combine_splits = kernels
    code = attend.binary.asm["ptx"]
    copies, products = (len(re.findall(word, code)) for word in ("cp.async.cg.shared", "mma.*sync"))
    return attend.binary.metadata.shared, copies, products


if __name__ == "__main__":
    builds = {name: build(BFLOAT16[name], 90) for name in ("Llama", "StarCoder", "GPT-OSS")}
    builds["Gemma on sm_86"] = build(BFLOAT16["Gemma"], 86)
    print(json.dumps(builds))
