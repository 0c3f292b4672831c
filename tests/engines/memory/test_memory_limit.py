"""A real engine under load, as full as its measured memory model allows: what it takes stays within what it may."""

from pathlib import Path

import pytest
from batches import engine_options
from repository import run_python
from tiny_models import make_model

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.padded.engine import PaddedEngine
from tgis.environment import LIBRARY_ENVIRONMENT
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

MiB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "granted", "share"),
    [("hf_transformers", 700 * MiB, 0.4), ("tgis_native", 500 * MiB, 0.3)],  # whose cache gets 0.4 of what is free
)
def test_full_batches_stay_within_the_memory_granted(
    smollm2_dir: Path, engine: str, granted: int, share: float
) -> None:
    """A token's keys and values are 45 KiB in float32: some thousand tokens fit, of 48 requests of 8 to 512."""
    script = "tests/support/memory_limit_run.py"
    found = run_python(script, engine, smollm2_dir, str(granted), **LIBRARY_ENVIRONMENT)
    print(found)
    assert found["taken"] < granted
    assert found["fullest"] > 0.8 * found["room"]  # the batch became as full as it may be
    assert found["taken"] > share * granted  # and the capacity is not overly cautious


@pytest.mark.parametrize("name", ["T5", "OPT, 350m"])
def test_every_kind_of_padded_model_is_measured(name: str, tmp_path: Path) -> None:
    changes = {"estimate_memory": "auto", "max_sequence_length": 64}
    engine = PaddedEngine(engine_options(make_model(name, tmp_path), 3, **changes))
    engine.warm_up()
    assert 1000 < engine.info.token_capacity < 1 << 40
    seq = Sequence(Request(1, [5, 6, 7], 2, False, SamplingParams(), LogprobOptions()), 0.0)
    assert len(engine.step(StepPlan.compute_all([seq])).tokens) == 1  # no dummy sequence is left
