"""Loads a model on the CPU, once for each QUANTIZE, and prints the peak bytes of memory that each took, mapped files
excluded: MODEL DTYPE QUANTIZE...

Each has a process, forked before anything was loaded, so that nothing else is counted.
"""

import json
import multiprocessing
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from batches import engine_options

from tgis.engines.kernels.cpu.gemm import Gemm
from tgis.engines.kernels.cpu.linear import PackedLinear
from tgis.engines.loading.loader import load_model
from tgis.engines.memory.available import PROCESS, read_proc_bytes


def peak_bytes(model: Path, dtype: str, quantize: str) -> int:
    options = engine_options(model, 8, dtype=dtype, quantize=quantize, quantize_logits=quantize != "none")
    idle = read_proc_bytes(PROCESS / "status", "RssAnon")
    seen = [idle]

    class Watched(PackedLinear):
        def __init__(self, linear: torch.nn.Linear, gemm: Gemm, dtype: torch.dtype) -> None:
            super().__init__(linear, gemm, dtype)
            seen.append(read_proc_bytes(PROCESS / "status", "RssAnon"))

    with patch("tgis.engines.kernels.cpu.linear.PackedLinear", Watched):
        load_model(options, torch.device("cpu"))
    return max(*seen, read_proc_bytes(PROCESS / "status", "RssAnon")) - idle


if __name__ == "__main__":
    cases = [(Path(sys.argv[1]), sys.argv[2], quantize) for quantize in sys.argv[3:]]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(pool.starmap(peak_bytes, cases, chunksize=1)))
