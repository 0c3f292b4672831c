"""In float32 and with quantized weights, every instruction set with fused multiply-add gives the same bits.

PyTorch and MKL choose theirs once in a process: AVX2 and AVX-512 have one child each.
"""

import hashlib
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from random_requests import KINDS, WISHES
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
from tgis.ipc.request import Request

CONFIGS = {"Llama": make_wide_config("Llama", **LONG), **WIDE_ENCODER_DECODERS}
ISAS_OF = {"AVX2": ("avx2", "avx2_vnni"), "AVX512": ("avx512", "avx512_vnni", "avx512_bf16")}


def requests() -> list[Request]:
    """One of each kind, of up to 150 tokens."""
    rng = random.Random(3)
    inputs = [rng.choices(range(3, 60), k=rng.randint(1, 150)) for _ in KINDS]
    made = zip(inputs, KINDS, strict=True)
    return [
        Request(i, tokens, 12, sampling_params=kind, logprob_options=WISHES[i % len(WISHES)])
        for i, (tokens, kind) in enumerate(made)
    ]


def print_answers(isas: list[str], models: list[Path]) -> None:
    """For each, a hash of tokens and logprobs."""
    for isa, model, quantize in product(isas, models, ("none", "int8")):
        engine = paged_engine(model, len(KINDS), cpu_isa=isa, quantize=quantize)
        answers, _ = outcomes(engine, limits_of(engine, 400), requests(), None)
        print(isa, model.name, quantize, hashlib.sha256(repr(answers).encode()).hexdigest())


@pytest.mark.parametrize(
    "names", [("Llama", "T5"), pytest.param(("Bart", "Marian"), marks=pytest.mark.slow)], ids=" and ".join
)
def test_every_instruction_set_gives_the_same_bits(tmp_path: Path, names: tuple[str, ...]) -> None:
    models = [make_model_from_config(CONFIGS[name], tmp_path / name) for name in names]
    lines: list[str] = []
    for name, isas in ISAS_OF.items():
        here = [isa for isa in isas if ISAS[isa] <= cpu_flags()]
        libraries = {"ATEN_CPU_CAPABILITY": name.lower(), "MKL_ENABLE_INSTRUCTIONS": name}
        settings = os.environ | libraries | {"PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, __file__, ",".join(here), *map(str, models)]
        done = subprocess.run(command, env=settings, check=True, stdout=subprocess.PIPE, text=True)
        lines += done.stdout.splitlines() if here else []
    if not lines:
        pytest.skip("no AVX2")
    by_model: dict[str, set[str]] = {}
    for _, model, quantize, digest in map(str.split, lines):
        by_model.setdefault(f"{model} {quantize}", set()).add(digest)
    assert len(by_model) == 2 * len(models)
    assert all(len(digests) == 1 for digests in by_model.values()), "\n".join(lines)


if __name__ == "__main__":
    print_answers(sys.argv[1].split(","), [*map(Path, sys.argv[2:])])
