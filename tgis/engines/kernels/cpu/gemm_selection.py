"""Which GEMM multiplies by a weight on this machine.

Ours, as long as neighbours must not change the bits of a row; any otherwise. Of several, a short measurement decides
for each shape. It is kept in CACHE_DIR, so that every start on a machine takes the same one.
"""

import contextlib
import hashlib
import json
import logging
import math
import time
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.gemm import CpuGemm, Gemm, MakeGemm, OneDnnGemm, is_right, our_gemms
from tgis.engines.kernels.cpu.huge_pages import HugePages
from tgis.engines.kernels.cpu.library import CpuKernels, cpu_model
from tgis.utils.file_lock import locked

log = logging.getLogger(__name__)

_ROWS = (1, 8, 32, 128)  # of the measurement: decodes, and prompts
_REPEATS = 3
_PREFERENCE = 0.9  # of the time of those before it must be enough for a GEMM
_FLUSH_BYTES = 64 << 20  # read before each call: a step finds few of its weights in a cache


class GemmSelector:
    """The GEMM for each weight."""

    def __init__(self, kernels: CpuKernels | None, cache_dir: str = "", *, batch_invariant: bool = True) -> None:
        self._kernels, self._batch_invariant = kernels, batch_invariant
        self._directory = Path(cache_dir, "kernels") if cache_dir else None
        self._memory = HugePages()
        self._wrong: dict[tuple[str, torch.dtype], bool] = {}
        self._choices: dict[str, str] = {}
        self.counts: Counter[str] = Counter()  # weights, by what multiplies by them

    def gemm(self, weight: Tensor) -> Gemm | None:
        """With a weight [out, in]; None where nothing beats plain PyTorch."""
        makers = self._candidates(weight)
        if not makers:
            return None
        name = next(iter(makers)) if len(makers) == 1 else self._fastest(weight, makers)
        self.counts[name] += 1
        gemm = makers[name](weight)
        if isinstance(gemm, CpuGemm):
            gemm.move_to(self._memory)
        return gemm

    def _candidates(self, weight: Tensor) -> dict[str, MakeGemm]:
        """The GEMMs that may be used, by name: those that are wrong on this CPU are left out."""
        found = {
            name: make
            for name, make in our_gemms(weight, self._kernels).items()
            if not self._is_wrong(name, make, weight.dtype)
        }
        if (not found or not self._batch_invariant) and OneDnnGemm.supports(weight):
            found["onednn"] = OneDnnGemm
        return found

    def _is_wrong(self, name: str, make: MakeGemm, dtype: torch.dtype) -> bool:
        if (name, dtype) not in self._wrong:
            self._wrong[name, dtype] = not is_right(make, dtype)
            if self._wrong[name, dtype]:
                log.warning("CPU kernels: linear layers by %s in %s are wrong on this CPU, and off", name, _name(dtype))
        return self._wrong[name, dtype]

    def _fastest(self, weight: Tensor, makers: dict[str, MakeGemm]) -> str:
        shape = f"{_name(weight.dtype)} {weight.shape[1]} -> {weight.shape[0]} by {', '.join(makers)}"
        if shape not in self._choices:
            self._choices[shape] = self._kept_or_measured(shape, weight, makers)
        return self._choices[shape]

    def _kept_or_measured(self, shape: str, weight: Tensor, makers: dict[str, MakeGemm]) -> str:
        if self._directory is None:
            return _measured(shape, weight, makers)
        path = self._directory / f"gemm-{_machine_hash(self._kernels)}.json"
        with locked(self._directory / "lock"):  # other ranks do not disturb the measurement
            kept = _read(path)
            if kept.get(shape) not in makers:
                kept[shape] = _measured(shape, weight, makers)
                _write(path, kept)
        return kept[shape]


def _measured(shape: str, weight: Tensor, makers: dict[str, MakeGemm]) -> str:
    """The first, unless another is clearly faster."""
    times = {name: _seconds(make, weight) for name, make in makers.items()}
    means = {name: math.prod(each) ** (1 / len(each)) for name, each in times.items()}
    best = next(iter(makers))
    for name, mean in means.items():
        if mean < _PREFERENCE * means[best]:
            best = name
    shown = "; ".join(f"{name} {', '.join(f'{1e3 * t:.3g}' for t in each)}" for name, each in times.items())
    log.info("linear layers %s take %s ms with %s rows: using %s", shape, shown, ", ".join(map(str, _ROWS)), best)
    return best


def _seconds(make: MakeGemm, weight: Tensor) -> list[float]:
    """The time of one call for each number of rows, the best of a few."""
    gemm, flush, found = make(weight), torch.zeros(_FLUSH_BYTES // 4), []
    for rows in _ROWS:
        x, best = torch.zeros(rows, weight.shape[1], dtype=weight.dtype), math.inf
        gemm(x, None)
        for _ in range(_REPEATS):
            flush.sum()
            started = time.perf_counter()
            gemm(x, None)
            best = min(best, time.perf_counter() - started)
        found.append(best)
    return found


@cache
def _machine_hash(kernels: CpuKernels | None) -> str:
    """Changes with whatever may change the result of the measurement."""
    machine = cpu_model(), kernels and kernels.path.name, torch.__version__, torch.get_num_threads()
    return hashlib.sha256(repr(machine).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, str]:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _write(path: Path, kept: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # the directory may be read-only
        made = path.with_suffix(".part")
        made.write_text(json.dumps(kept, indent=1) + "\n")
        made.replace(path)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
