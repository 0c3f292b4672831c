"""A real engine under load, as full as its measured memory model allows: what it takes stays within what it may."""

import os
import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from batches import commit, engine_options
from forked_processes import forked
from tiny_models import make_model

from tgis.batcher.batcher import Batcher
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engine_core.main import batch_limits
from tgis.engines.memory import available
from tgis.engines.memory.available import PeakMeter
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.paged.engine import PagedEngine
from tgis.environment import LIBRARY_ENVIRONMENT
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

MiB = 1 << 20
LONGEST, ROWS, REQUESTS = 512, 16, 48
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=50.0, seed=3, top_p=0.999, typical_p=0.99),
    SamplingParams(repetition_penalty=1.3),
]
ALL_DETAILS = LogprobOptions(generated_tokens=True, input_tokens=True, logprobs=True, ranks=True, top_n_tokens=10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "granted", "share"),
    [(PaddedEngine, 700 * MiB, 0.4), (PagedEngine, 500 * MiB, 0.3)],  # whose cache gets 0.4 of what is free
)
def test_full_batches_stay_within_the_memory_granted(
    smollm2_dir: Path, engine: type[PaddedEngine] | type[PagedEngine], granted: int, share: float
) -> None:
    """A token's keys and values are 45 KiB in float32: some thousand tokens fit, of 48 requests of 8 to 512."""
    capacity, fullest, taken = forked(fill_batches, engine, smollm2_dir, granted)
    print(f"{capacity} tokens fit, at most {fullest} were held; {taken} of {granted} bytes taken")
    assert taken < granted
    assert fullest > 0.8 * capacity  # the batch became as full as it may be
    assert taken > share * granted  # and the capacity is not overly cautious


def fill_batches(kind: type[PaddedEngine] | type[PagedEngine], model: Path, granted: int) -> tuple[int, int, int]:
    """The token capacity with so much memory, the most tokens in a batch, and the peak bytes."""
    os.environ |= LIBRARY_ENVIRONMENT
    changes = {"max_sequence_length": LONGEST, "estimate_memory": "auto"}
    options = engine_options(model, ROWS, num_threads=torch.get_num_threads(), **changes)
    engine = kind(options)
    available.available_memory = lambda device: granted  # beside the weights
    meter = PeakMeter(torch.device("cpu"))
    idle = meter.reset()
    engine.warm_up()
    batcher, fullest, now, ended = Batcher(batch_limits(options, engine.info), ()), 0, 0.0, 0
    batcher.submit(requests(random.Random(1), engine.info.vocab_size), now)
    while not batcher.idle:
        plan = batcher.plan(now := now + 1.0)
        engine.release(plan.to_release)
        if plan.seqs:
            result = engine.step(plan)
            fullest = max(fullest, batcher.context_tokens)
            ended += len(commit(batcher, plan, result.tokens, now))
    assert ended == REQUESTS
    return engine.info.token_capacity, fullest, meter.peak() - idle


def requests(rng: random.Random, vocabulary: int) -> list[Request]:
    """Short and long requests, some with all logprob options."""
    made = []
    for number in range(REQUESTS):
        length = int(2 ** rng.uniform(3, 8.8))
        output = min(LONGEST - length, int(2 ** rng.uniform(2, 6)))
        tokens = [rng.randrange(vocabulary) for _ in range(length)]
        details = ALL_DETAILS if rng.random() < 0.3 else LogprobOptions()
        made.append(Request(number, tokens, output, False, rng.choice(KINDS), details))
    return made


@pytest.mark.parametrize(("name", "told"), [("T5", 0), ("OPT, 350m", 128)])
def test_every_kind_of_padded_model_is_measured(name: str, told: int, tmp_path: Path) -> None:
    changes = {"estimate_memory": "auto", "max_sequence_length": 64}
    engine = PaddedEngine(engine_options(make_model(name, tmp_path), 3, **changes))
    engine.warm_up()
    assert 1000 < engine.info.token_capacity < 1 << 40
    seqs = [Sequence(Request(n, [5, 6, 7], 2, False, SamplingParams(), LogprobOptions()), 0.0) for n in (1, 2)]
    assert len(engine.step(plan := StepPlan.compute_all(seqs)).tokens) == 2  # no dummy sequence is left
    assert (engine.with_drafts(plan), engine.clear_cache()) == (plan, False)
    layers = [layer for cache in engine._model._caches for layer in cache.past_key_values.layers]
    assert engine.kv_cache_bytes == sum(buffer.nbytes for layer in layers for buffer in layer.buffers)
    engine.find_peak(runner := mock.Mock())
    runner.padded_peak.assert_called_once_with(62, told, chunked=bool(told))
