"""What decides the numbers has a version, and is the same on all CPUs with fused multiply-add, in float32 and with
quantized weights; the engine knows where they depend on the batch.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import engine_options
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
# For each version of the arithmetic, of the answers of models with some options.
DIGESTS = {
    1: {
        ("Llama", "float32", "none"): "1b2b3968dd7ab016",
        ("Llama", "float32", "int8"): "fb23256c08fd0a1e",
        ("T5", "float32", "none"): "cabfd638101ae95b",
        ("T5", "float32", "int8"): "5af0b6f4d55d7f94",
        ("Bart", "float32", "none"): "e421560fdffccd70",
        ("Bart", "float32", "int8"): "bc1a45d7521d64ce",
        ("Marian", "float32", "none"): "4f6eaafcff41ea94",
        ("Marian", "float32", "int8"): "f9936a0f81432945",
        ("Llama", "bfloat16", "none"): "b8d8f3875a8c6601",  # on AVX512-BF16
    }
}
CASES = [*DIGESTS[ARITHMETIC_VERSION].items()]
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


@pytest.mark.parametrize("isa", FUSED)
@pytest.mark.parametrize(("case", "expected"), CASES)
def test_a_change_of_answers_is_a_new_version(
    case: tuple[str, str, str], expected: str, isa: str, tmp_path: Path
) -> None:
    name, dtype, quantize = case
    if not ISAS[isa] <= cpu_flags() or (dtype == "bfloat16" and isa != "avx512_bf16"):
        pytest.skip(f"no {isa}")
    model = with_known_weights(make_model_from_config(CONFIGS[name], tmp_path))
    engine = paged_engine(model, 4, dtype=dtype, cpu_isa=isa, quantize=quantize)
    requests = [
        Request(
            n, [3 + (n * n + 7 * at) % 50 for at in range(5 + 3 * n)], 8, sampling_params=kind, logprob_options=wish
        )
        for n, (kind, wish) in enumerate(zip(KINDS, WISHES * len(KINDS), strict=False))
    ]
    answers, _ = outcomes(engine, limits_of(engine, 400), requests, None)
    digest = hashlib.sha256(repr(answers).encode()).hexdigest()[:16]
    assert digest == expected, "the arithmetic has changed: raise ARITHMETIC_VERSION and add its digests"


def test_the_instruction_sets_of_pytorch_and_mkl_change_no_answer() -> None:
    """They choose theirs once in a process: here what the CPU has, in a child AVX2."""
    settings = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    command = sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "new_version and avx2"
    done = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout


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
    model = make_model_from_config(make_wide_config(name, **changes), tmp_path)
    assert paged_engine(model, **{"dtype": "float32"} | options).info.invariant is invariant
