"""Sequences with soft prompts and LoRA adapters in mixed batches of both engines, compared with PEFT one by one."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from batches import engine_options, limits
from tiny_models import EOS, VOCAB_SIZE, check_greedy, outcomes

from tgis.batcher.capacity import BatchLimits
from tgis.engines.base import Engine
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.paged.engine import PagedEngine
from tgis.frontend import validation
from tgis.frontend.params import Params
from tgis.frontend.validation import make_request, validate
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.request import LogprobOptions, Request, TokenLogprobs
from tgis.prompts.store import AdapterStore, LoadedAdapter
from tgis.prompts.tensor_file import TargetModel

PLACEHOLDER = 0


ENGINES: dict[str, type[PaddedEngine] | type[PagedEngine]] = {
    "padded": PaddedEngine,
    "paged": PagedEngine,
}
BOUNDS = {
    "padded": limits(100_000, max_batch_size=8, prefill_tokens=512, max_prefill_padding=0.9),
    # chunks end anywhere in prompts; few enough blocks that sequences are preempted
    "paged": limits(
        160, padded=False, block_size=16, prefix_cache=True, max_batch_size=8, prefill_tokens=7, proposed_tokens=4
    ),
}


@dataclass
class EngineSetup:
    """An engine, and the limits of its batches."""

    engine: Engine
    bounds: BatchLimits
    ids: Iterator[int] = field(default_factory=itertools.count)  # unique over all runs of the engine


def make_setup(kind: str, model: Path) -> EngineSetup:
    engine = ENGINES[kind](engine_options(model, 16))
    engine.warm_up()
    encodes = kind == "paged" and engine.info.encoder_decoder
    return EngineSetup(engine, replace(BOUNDS[kind], encoder_decoder=encodes))


@dataclass(frozen=True)
class AdapterRequest:
    """An input with an adapter or none."""

    tokens: list[int]
    prompt: LoadedAdapter | None
    new: int
    details: LogprobOptions = field(default_factory=LogprobOptions)

    def request(self, number: int) -> Request:
        """As the front end makes it."""
        params = Params(max_new_tokens=self.new, logprob_options=self.details)
        most = validation.RequestLimits(256, 100, include_stop_sequence=True, placeholder_id=PLACEHOLDER)
        prompt = self.prompt
        prefix = AdapterRef("p", prompt.length, prompt.decoder_length, number, prompt.version) if prompt else None
        validate(params, most)
        return make_request(
            self.tokens, prefix, params, most, "text", id=number, sampling_params=params.sampling_params(0)
        )


def generate_all(
    setup: EngineSetup, jobs: list[AdapterRequest], seed: int = 0, eos: int = 3
) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
    """Generated tokens of requests that arrive at random steps, and the logprobs of their inputs."""
    requests = [job.request(next(setup.ids)) for job in jobs]
    adapters = {request.id: job.prompt for request, job in zip(requests, jobs, strict=True)}
    got, _ = outcomes(setup.engine, setup.bounds, requests, random.Random(seed), adapters, eos=eos)
    return [one.tokens for one in got.values()], [one.inputs for one in got.values()]


def store_for(setup: EngineSetup, path: Path) -> AdapterStore:
    """As the engine process opens it."""
    info = setup.engine.info
    target = TargetModel(
        info.embedding_size, 64, torch.float32, torch.device("cpu"), info.encoder_decoder, info.lora_targets
    )
    return AdapterStore(str(path), 16 << 20, target)


def check_mixed(setup: EngineSetup, models: list[Any], adapters: list[LoadedAdapter | None]) -> int:
    """Twelve random inputs in one batch generate what PEFT's models do; how many an adapter changes."""
    rng = random.Random(2)
    tokens = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 20))] for _ in range(12)]
    jobs = [AdapterRequest(some, adapters[n % len(adapters)], 10) for n, some in enumerate(tokens)]
    generated, _ = generate_all(setup, jobs, eos=EOS)
    for n, output in enumerate(generated):
        assert check_greedy(models[n % len(models)], tokens[n], output) > 0.8 * len(output)
    bare, _ = generate_all(setup, [AdapterRequest(some, None, 10) for some in tokens], eos=EOS)
    return sum(output != plain for output, plain in zip(generated, bare, strict=True))
