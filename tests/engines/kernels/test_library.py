"""Which library of C kernels is used: by the CPU's features and CPU_ISA, prebuilt or compiled once."""

import logging
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
from cpu_kernels import CACHE_DIR, kernels_of
from tiny_models import tgis_warnings

from tgis import config
from tgis.engines.kernels.cpu import build, library
from tgis.engines.kernels.cpu.library import ISAS, computes_in_bf16, cpu_flags, load_kernels, resolve_isa
from tgis.errors import StartError

SSE = "fpu sse sse2 ssse3 sse4_1 sse4_2 popcnt"
AVX2 = f"{SSE} avx f16c fma avx2 bmi2"
AVX512 = f"{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl"
CPUS = {
    "qemu64": (SSE, "generic"),
    "AMD Zen 3": (AVX2, "avx2"),
    "Xeon Phi": (f"{AVX2} avx512f avx512cd avx512er avx512pf", "avx2"),
    "Ice Lake": (f"{AVX512} avx512_vnni", "avx512_vnni"),
    "Alder Lake": (f"{AVX2} avx_vnni", "avx2_vnni"),
    "AMD Zen 4": (f"{AVX512} avx512_vnni avx512_bf16", "avx512_bf16"),
    "Sapphire Rapids": (f"{AVX512} avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8", "amx"),
    "Sapphire Rapids, AMX hidden": (f"{AVX512} avx512_vnni avx512_bf16", "avx512_bf16"),
    "Raspberry Pi 4": ("fp asimd evtstrm crc32 cpuid", "generic"),
    "Graviton 2": ("fp asimd evtstrm aes atomics asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs", "neon_dotprod"),
    "Graviton 3": ("fp asimd evtstrm aes atomics asimddp sve svei8mm svebf16 i8mm bf16", "neon_bf16"),
}


def finished_library() -> Path:
    return Path(kernels_of("generic")._library._name)


@pytest.mark.parametrize("name", CPUS)
def test_the_best_instruction_set_of_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And bfloat16 is the default where its kernels multiply it."""
    flags, best = CPUS[name]
    assert resolve_isa("auto", frozenset(flags.split())) == best
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(flags.split()))
    multiplies = best in {"avx512_bf16", "amx", "neon_bf16"}
    assert [computes_in_bf16(isa) for isa in ("auto", "none", "generic")] == [multiplies, multiplies, False]


def test_a_worse_one_can_be_named_and_a_better_one_cannot() -> None:
    flags = frozenset(AVX512.split())
    for isa in ("none", "generic", "avx2", "avx512"):
        assert resolve_isa(isa, flags) == isa
    with pytest.raises(StartError, match=r"^CPU_ISA=avx512_bf16: this CPU lacks avx512_bf16, avx512_vnni$"):
        resolve_isa("avx512_bf16", flags)
    with pytest.raises(StartError, match=r"^CPU_ISA=amx: this CPU lacks amx_bf16, amx_int8, amx_tile, avx512_bf16"):
        resolve_isa("amx", flags)
    with pytest.raises(StartError, match="lacks avx2, f16c, fma"):
        resolve_isa("avx2", frozenset())


def test_amx_is_left_alone_where_the_system_refuses_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if ISAS["amx"] <= cpu_flags():
        pytest.skip("this CPU has AMX")
    library_isa = kernels_of("avx512_bf16").isa
    monkeypatch.setattr(library, "cpu_flags", lambda: ISAS["amx"])
    load_kernels.cache_clear()
    kernels = load_kernels("auto", CACHE_DIR)
    assert kernels is not None
    assert kernels.isa == library_isa
    assert "CPU kernels: the system lets no process use AMX" in caplog.text


def test_the_option_takes_every_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in ("auto", "none", *ISAS):
        assert config.parse([], {"MODEL_NAME": "m", "CPU_ISA": isa}, "tgis serve").cpu_isa == isa
    assert set(build.isa_flags()) <= set(ISAS)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    flags = {"generic": (), "neon_dotprod": ("-march=armv8.2-a+dotprod",)}
    assert build.isa_flags() == flags | {"neon_bf16": ("-march=armv8.2-a+dotprod+i8mm+bf16",)}


@pytest.mark.parametrize("line", ["flags\t\t: fpu avx2 fma", "Features\t: fpu avx2 fma"])
def test_flags_are_read_as_linux_shows_them(tmp_path: Path, line: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nvmx flags\t: vnmi\n\nprocessor\t: 1\n{line}\n")
    assert cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "fma"}
    assert cpu_flags(tmp_path / "missing") == frozenset()


def test_openmp_is_not_linked() -> None:
    """Two OpenMP libraries in one process would have twice as many threads."""
    path = finished_library()
    assert b"GOMP_parallel" in path.read_bytes()
    assert b"libgomp" not in path.read_bytes()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been compiled, by a compiler that takes a finished library from elsewhere."""
    finished, names = finished_library(), []

    def compile_library(isa: str, _compiler: str, directory: Path) -> Path:
        names.append(isa)
        return Path(shutil.copy(finished, directory / f"{isa}.so"))

    monkeypatch.setattr(build, "compile_library", compile_library)
    return names


def test_a_library_is_compiled_once(tmp_path: Path, compiled: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        load_kernels.cache_clear()
        assert load_kernels("generic", str(tmp_path)) is not None
    assert compiled == ["generic"]
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    file = directory / f"generic-{build.source_hash('generic')}.so"
    assert {*directory.iterdir()} == {directory / "lock", file}
    assert file.stat().st_mode & 0o777 == 0o500
    compiling = f"compiling CPU kernels for generic, about a minute, once for all starts with {directory}"
    assert caplog.messages == [compiling, *[f"CPU kernels: generic ({file})"] * 2]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("what", ["directory", "library"])
def test_nothing_is_loaded_that_others_can_write(tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    assert load_kernels("generic", str(tmp_path))
    (path,) = (tmp_path / "kernels").glob("*.so") if what == "library" else [tmp_path / "kernels"]
    path.chmod(0o777)
    load_kernels.cache_clear()
    assert load_kernels("generic", str(tmp_path)) is None
    assert f"every user can write to {path}" in caplog.text


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (None, "no C compiler (cc)"),
        ("#!/bin/sh\nexit 1\n", "cc: exit code 1"),
        ("#!/bin/sh\necho 'x.c:1: error: bad\nerror: x' >&2; exit 1\n", "cc: x.c:1: error: bad"),
        ("#!/bin/sh\nexec sleep 60\n", "timed out after 0.01 seconds"),
    ],
)
def test_a_machine_without_a_compiler_says_so_once(
    compiler: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    if compiler is not None:
        (tmp_path / "cc").write_text(compiler)
        (tmp_path / "cc").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin" if compiler else str(tmp_path))
    if "timed out" in reason:
        monkeypatch.setattr(build, "_TIMEOUT_SECONDS", 0.01)
    for _ in range(2):
        assert load_kernels("generic", str(tmp_path / "cache")) is None
    (warning,) = tgis_warnings(caplog)
    assert warning.startswith("no CPU kernels, plain PyTorch is slower: ")
    assert warning.endswith(reason)
    assert [path.name for path in (tmp_path / "cache" / "kernels").iterdir()] == ["lock"]


def test_a_compiler_that_fails_once_is_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = f"""#!/bin/sh
    while [ "$1" != -o ]; do shift; done
    [ -e "$2.tried" ] || {{ touch "$2.tried"; exit 1; }}
    cp {finished_library()} "$2"
    """
    (tmp_path / "cc").write_text(compiler)
    (tmp_path / "cc").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert load_kernels("generic", str(tmp_path / "cache")) is not None


def test_a_prebuilt_library_needs_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(finished_library(), tmp_path / "generic.so")
    monkeypatch.setattr(library, "_HERE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    caplog.set_level(logging.INFO)
    assert load_kernels("generic", str(tmp_path / "cache"))
    assert load_kernels("none", str(tmp_path / "cache")) is None
    assert caplog.messages == [f"CPU kernels: generic ({tmp_path / 'generic.so'})", "CPU kernels: none"]
    assert not (tmp_path / "cache").exists()
