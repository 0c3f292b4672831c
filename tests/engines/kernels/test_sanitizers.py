"""The C kernels with random shapes under AddressSanitizer and UndefinedBehaviorSanitizer, for every instruction set."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_kernels import CPU_ISA
from repository import REPOSITORY

from tgis.engines.kernels.cpu.build import compile_library, isa_flags
from tgis.engines.kernels.cpu.library import ISAS, cpu_flags

SUPPORT = REPOSITORY / "tests" / "support"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so.6")  # the last because PyTorch throws exceptions
RUNS = 150

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def runtime(name: str) -> str:
    """The path of the compiler's library; skips the test if it has none."""
    path = subprocess.run(["cc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the C compiler has no {name}")
    return path


@pytest.fixture(scope="module", params=list(isa_flags()))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An instruction set and its library."""
    isa = request.param
    if not ISAS[isa] <= cpu_flags() or CPU_ISA == "none" or shutil.which("cc") is None:
        pytest.skip(f"no {isa}, or no C compiler")
    return isa, compile_library(isa, "cc", tmp_path_factory.mktemp(isa), SANITIZE)


def run(library: tuple[str, Path], runs: int) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {
        "LD_PRELOAD": " ".join(map(runtime, RUNTIMES)),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",  # Python and PyTorch keep much until the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(SUPPORT)]),
    }
    command = [sys.executable, str(SUPPORT / "kernel_runs.py"), library[0], str(library[1]), "1", str(runs)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_random_shapes_stay_in_bounds_and_give_what_pytorch_gives(library: tuple[str, Path]) -> None:
    done = run(library, RUNS)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = ast.literal_eval(done.stdout)
    kinds = ("attention", "norm", "rotary", "gated_mlp", "recording", "gemm", "quantized", "gumbel_max", "argmax")
    assert counts.keys() == {f"run_{kind}" for kind in kinds}
    assert min(counts.values()) > RUNS / 30


def test_an_access_out_of_bounds_is_found(library: tuple[str, Path]) -> None:
    done = run(library, 0)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
