"""The tests of the C kernels under AddressSanitizer and UndefinedBehaviorSanitizer, for every instruction set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_kernels import kernels_of
from repository import REPOSITORY, python_path

from tgis.engines.kernels.cpu.build import compile_library, isa_flags, source_hash
from tgis.engines.kernels.cpu.library import ISAS, cpu_flags

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so.6")  # the last because PyTorch throws exceptions
NAMES = ("collectives", "cpu_attention", "cpu_sampling", "fused_ops", "linear", "quantized", "recording", "recurrent")
FILES = [f"tests/engines/kernels/test_{name}.py" for name in NAMES]
LEFT_OUT = "not amx"  # which is emulated by a handler of signals
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def runtime(name: str) -> str:
    """The path of the compiler's library; skips the test if it has none."""
    path = subprocess.run(["cc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the C compiler has no {name}")
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A test cache with libraries that check what they access."""
    kernels_of("generic")  # or the test is skipped
    cache = tmp_path_factory.mktemp("cache")
    (cache / "kernels").mkdir(mode=0o700)
    for isa in isa_flags():
        if ISAS[isa] <= cpu_flags():
            library = compile_library(isa, "cc", tmp_path_factory.mktemp(isa), SANITIZE)
            library.rename(cache / "kernels" / f"{isa}-{source_hash(isa)}.so")
    return cache


def test_kernels_stay_in_bounds(cache: Path) -> None:
    environment = os.environ | {
        "LD_PRELOAD": " ".join(map(runtime, RUNTIMES)),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",  # Python and PyTorch keep much until the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": python_path(REPOSITORY, REPOSITORY / "tests" / "support"),
        "TGIS_TEST_CACHE": str(cache),
    }
    options = "-q", "--capture=sys", "-p", "no:cacheprovider", "-m", "not slow", "-k", LEFT_OUT
    command = [sys.executable, "-m", "pytest", *options, *FILES]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
