"""What decides the numbers has a version, and is the same on all CPUs with fused multiply-add, in float32 and with
quantized weights; the engine knows where they depend on the batch.
"""

import hashlib
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import engine_options
from cpu_kernels import CPU_ISA, kernels_of
from msgspec.structs import replace
from random_requests import KINDS, WISHES
from safetensors.torch import load_file, save_file
from tiny_models import (
    LONG,
    WIDE_ENCODER_DECODERS,
    limits_of,
    make_model_from_config,
    make_wide_config,
    outcomes,
    paged_engine,
)

from tgis.engines.kernels.cpu.library import ISAS, cpu_flags
from tgis.engines.loading.arithmetic import ARITHMETIC_VERSION, with_arithmetic
from tgis.ipc.messages import EngineInfo
from tgis.ipc.request import Request

CONFIGS = {"Llama": make_wide_config("Llama", **LONG), **WIDE_ENCODER_DECODERS}
_GOLDEN_RATIO = (5**0.5 - 1) / 2
# For each version of the arithmetic, of the answers in float32, and in bfloat16 on AVX512-BF16.
DIGESTS = {1: ("1b2b3968dd7ab016", "b8d8f3875a8c6601")}
CASES = [*product(("Llama", "T5", "Bart", "Marian"), ("none", "int8"))]
FUSED = "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16"


def with_known_weights(model: Path) -> Path:
    """Weights that no random generator makes."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        evenly_spread = torch.arange(tensor.numel(), dtype=torch.float64) * _GOLDEN_RATIO + number / 7
        tensors[name] = (evenly_spread % 1 - 0.5).view(tensor.shape).float() * 0.7 + (tensor.ndim == 1)
    save_file(tensors, path, {"format": "pt"})
    return model


def digest_of(name: str, directory: Path, isa: str, **options: Any) -> str:
    """Of the tokens and logprobs of a request of each kind."""
    model = with_known_weights(make_model_from_config(CONFIGS[name], directory))
    engine = paged_engine(model, 4, cpu_isa=isa, **options)
    requests = [
        Request(
            n, [3 + (n * n + 7 * at) % 50 for at in range(5 + 3 * n)], 8, sampling_params=kind, logprob_options=wish
        )
        for n, (kind, wish) in enumerate(zip(KINDS, WISHES * len(KINDS), strict=False))
    ]
    answers, _ = outcomes(engine, limits_of(engine, 400), requests, None)
    return hashlib.sha256(repr(answers).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("dtype", "isa"), [("float32", "avx2"), ("bfloat16", "avx512_bf16")])
def test_a_change_of_answers_is_a_new_version(tmp_path: Path, dtype: str, isa: str) -> None:
    kernels_of(isa)  # or the test is skipped
    versions = dict(zip(("float32", "bfloat16"), DIGESTS[ARITHMETIC_VERSION], strict=True))
    text = "the arithmetic has changed: raise ARITHMETIC_VERSION and add its digests"
    assert digest_of("Llama", tmp_path, isa, dtype=dtype) == versions[dtype], text


def test_every_instruction_set_gives_the_same_answers(tmp_path: Path) -> None:
    """PyTorch and MKL choose theirs once in a process: here what the CPU has, in a child AVX2."""
    kernels_of("avx2")  # or the test is skipped
    isas = [isa for isa in FUSED if ISAS[isa] <= cpu_flags()]
    settings = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "PYTHONPATH": ":".join(sys.path)}
    command = sys.executable, __file__, str(tmp_path)
    child = subprocess.run(command, env=os.environ | settings, check=True, stdout=subprocess.PIPE, text=True)
    lines = child.stdout.splitlines()[-len(CASES) :]
    for (name, quantize), line in zip(CASES, lines, strict=True):
        found = {isa: digest_of(name, tmp_path, isa, quantize=quantize, dtype="float32") for isa in isas}
        assert {*found.values()} == {line}, (name, quantize, found)


@pytest.mark.parametrize(
    ("changes", "asked", "added"),
    [
        ({}, {"quantize_logits": True}, ""),
        ({"quantize": "int8"}, {"quantize_logits": True}, " int8 True auto"),
        ({"kv_cache_dtype": "int8"}, {}, " 256"),  # computed for this length
    ],
)
def test_what_decides_the_numbers_is_told(changes: Any, asked: Any, added: str) -> None:
    info = replace(EngineInfo("fake", "F", "cpu", "float32", 9, False, False, 1, 0, 1), **changes)
    found = with_arithmetic(info, replace(engine_options(Path()), cpu_isa="avx2", num_shards=3, **asked))
    versions = f"{torch.__version__} {transformers.__version__} avx2 {torch.backends.cpu.get_cpu_capability()}"
    assert found.arithmetic == f"1 fake float32 {info.kv_cache_dtype} 3 {versions}{added}"
    assert not found.invariant


@pytest.mark.parametrize(
    ("name", "changes", "options", "invariant"),
    [
        ("Llama", {}, {"quantize": "int8", "kv_cache_dtype": "int8"}, True),
        ("Llama", {}, {"cpu_isa": "none"}, False),
        ("Llama", {}, {"dtype": "float16"}, False),
        ("Llama", {"head_dim": 12}, {}, True),
        ("Llama", {"intermediate_size": 33}, {"dtype": "bfloat16"}, True),
        ("JetMoe", {}, {}, False),
        ("Llama4Text", {}, {}, False),
    ],
)
def test_where_bits_depend_on_the_batch(
    tmp_path: Path, name: str, changes: dict[str, Any], options: dict[str, Any], invariant: bool
) -> None:
    if invariant:
        kernels_of(CPU_ISA)  # or the test is skipped
    model = make_model_from_config(make_wide_config(name, **changes), tmp_path)
    assert paged_engine(model, **{"dtype": "float32"} | options).info.invariant is invariant


if __name__ == "__main__":
    for name, quantize in CASES:
        print(digest_of(name, Path(sys.argv[1]), "avx2", quantize=quantize, dtype="float32"))
