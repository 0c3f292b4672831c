"""Fill batches up to the capacity that was found at the start, and report how much memory that took.

Run as `python memory_limit_run.py ENGINE MODEL GRANTED_BYTES`, in its own process so that nothing else is measured.
"""

import json
import random
import sys
from pathlib import Path

import torch
from batches import commit, engine_options

from tgis.batcher.batcher import Batcher
from tgis.engine_core.main import batch_limits
from tgis.engines.base import Engine
from tgis.engines.memory import available
from tgis.engines.memory.available import PeakMeter
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

LONGEST, ROWS, REQUESTS = 512, 16, 48
ENGINES: dict[str, type[PaddedEngine] | type[PagedEngine]] = {
    "hf_transformers": PaddedEngine,
    "tgis_native": PagedEngine,
}
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=50.0, seed=3, top_p=0.999, typical_p=0.99),
    SamplingParams(repetition_penalty=1.3),
]
CURIOUS = LogprobOptions(generated_tokens=True, input_tokens=True, logprobs=True, ranks=True, top_n_tokens=10)


def main(name: str, model: Path, granted: int) -> dict[str, int]:
    """The token capacity, the most tokens in a batch, and the peak bytes."""
    changes = {"max_sequence_length": LONGEST, "estimate_memory": "auto"}
    options = engine_options(model, ROWS, num_threads=torch.get_num_threads(), **changes)
    engine = ENGINES[name](options)
    available.available_memory = lambda device: granted  # beside the weights
    meter = PeakMeter(torch.device("cpu"))
    idle = meter.reset()
    engine.warm_up()
    fullest = run(engine, options, requests(random.Random(1), engine.info.vocab_size))
    return {"room": engine.info.token_capacity, "fullest": fullest, "taken": meter.peak() - idle}


def requests(rng: random.Random, vocabulary: int) -> list[Request]:
    """Short and long requests, some with all logprob options."""
    made = []
    for number in range(REQUESTS):
        length = int(2 ** rng.uniform(3, 8.8))
        output = min(LONGEST - length, int(2 ** rng.uniform(2, 6)))
        tokens = [rng.randrange(vocabulary) for _ in range(length)]
        details = CURIOUS if rng.random() < 0.3 else LogprobOptions()
        made.append(Request(number, tokens, output, False, rng.choice(KINDS), details))
    return made


def run(engine: Engine, options: EngineOptions, wanted: list[Request]) -> int:
    """Run all requests as fast as memory allows; returns the most tokens of context that a batch had."""
    batcher = Batcher(batch_limits(options, engine.info), ())
    batcher.submit(wanted, 0.0)
    fullest, now = 0, 0.0
    ended = 0
    while not batcher.idle:
        plan = batcher.plan(now := now + 1.0)
        engine.release(plan.to_release)
        if not plan.seqs:
            break
        result = engine.step(plan)
        fullest = max(fullest, batcher.context_tokens)
        ended += len(commit(batcher, plan, result.tokens, now))
    assert ended == len(wanted)
    return fullest


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
