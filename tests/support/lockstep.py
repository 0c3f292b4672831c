"""What ranks do that launch steps ahead: as one engine, or as two in lockstep."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from batches import engine_options, limits
from checked_runs import Launches
from grammar_walks import compiled, digits
from random_requests import KINDS, WISHES
from tiny_models import VOCAB_SIZE, outcomes

from tgis.batcher.sequence import Sequence
from tgis.engines.distributed import ranks
from tgis.engines.distributed.engine import ShardedEngine
from tgis.engines.distributed.follower import _compute_steps
from tgis.engines.distributed.mirror import SentSequences
from tgis.engines.paged import async_decode
from tgis.engines.paged.engine import PagedEngine
from tgis.engines.paged.self_check import dummy_adapter
from tgis.engines.sampling.logprobs import PendingCopy
from tgis.ipc.lookups import AdapterRef, AdapterStoreOptions, GrammarKind
from tgis.ipc.messages import Shutdown
from tgis.ipc.request import Request, SamplingParams

SIZE, ROWS, BLOCKS, REQUESTS, NEW_TOKENS = 4, 5, 26, 18, 30
NUMBERED, ADAPTED = {3, 9, 17}, {4, 5, 11}  # requests with a grammar, with a LoRA adapter
CANCELLED = {2: 4, 9: 11, 14: 1}  # after so many tokens
FAILURES = 5
Texts = dict[int, list[int]]


class Failure(Exception):
    """Of a step that all ranks can give up."""


class Messages:
    """Messages of rank 0 on their way to the other rank."""

    def receive(self, timeout: float | None = None) -> list[Any]:
        box: list[Any] = [None]
        dist.broadcast_object_list(box)
        return [msgspec.msgpack.decode(box[0], type=ranks.RankMessage)]

    def send(self, message: Any) -> None:
        dist.broadcast_object_list([msgspec.msgpack.encode(message)], dist.get_rank())

    def gave_up(self, seconds: float) -> bool:
        """As rank 0 hears it of the other one."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, 1)
        return bool(msgspec.msgpack.decode(box[0], type=ranks.RankMessage) == ranks.GiveUp())


def requests() -> list[Request]:
    rng, made = random.Random(5), []
    for number in range(REQUESTS):
        tokens = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        params = msgspec.structs.replace(KINDS[number % len(KINDS)], seed=number, stop_token_ids=())
        grammar = 1 if number in NUMBERED else None
        params = SamplingParams() if grammar else params
        adapter = AdapterRef("a", 0, 0, 1, -1) if number in ADAPTED else None
        made.append(
            Request(number, tokens, NEW_TOKENS, False, params, rng.choice(WISHES), grammar=grammar, adapter=adapter)
        )
    return made


def serve(engine: Any, adapter: Any) -> Texts:
    """Requests that join at some steps; some are cancelled, and there are so few blocks that some are preempted."""
    paged: dict[str, Any] = {"padded": False, "block_size": SIZE, "lookahead": 1, "prefix_cache": True}
    bounds = limits(BLOCKS * SIZE, max_batch_size=ROWS, prefill_tokens=9, **paged)
    table = digits(VOCAB_SIZE)

    def prepare(seq: Sequence) -> None:
        seq.grammar = compiled(GrammarKind.REGEX, "[0-9]{3,9}", table) if seq.request.grammar else None

    changes: dict[str, Any] = {"cancelled": CANCELLED, "failures": (Failure,), "prepare": prepare}
    adapters = dict.fromkeys(ADAPTED, adapter)
    found, counts = outcomes(engine, bounds, requests(), random.Random(2), adapters, **changes)
    assert counts["preempted"] > len(CANCELLED) + 2
    return {number: outcome.tokens for number, outcome in found.items() if number not in CANCELLED}


@contextmanager
def failures(mode: str) -> Iterator[None]:
    """Steps that fail on rank 0, or on all ranks, once the next one is launched."""
    target: tuple[Any, str] = async_decode, "step_result"
    if mode == "all ranks fail":
        target = PendingCopy, "wait"
    call, failed, count = getattr(*target), 0, 0

    def run(*args: Any) -> Any:
        nonlocal failed, count
        result, count = call(*args), count + 1
        if count % 7 == 0 and failed < FAILURES and (mode == "all ranks fail" or not dist.get_rank()):
            failed += 1
            raise Failure
        return result

    with mock.patch.object(*target, run):
        yield
    assert failed > 1 or dist.get_rank()


def as_engine(model: Path, mode: str) -> tuple[Texts, list[tuple[str, list[int]]]]:
    """What a rank gives: texts, if it is the first or only one, and its launches."""
    ranked = dist.is_initialized()
    store = AdapterStoreOptions("/nowhere", 1 << 30, 100)
    changes: dict[str, Any] = {"dtype": "float64", "num_shards": 2 if ranked else 1, "adapter_store": store}
    engine = PagedEngine(engine_options(model, ROWS, **changes), async_decode=True, block_size=SIZE)
    engine.warm_up()
    launches = Launches(engine, pytest.MonkeyPatch())
    adapter = dummy_adapter(engine.runner.lora.targets, torch.float64, torch.device("cpu"))
    with failures(mode) if "fail" in mode else nullcontext():
        texts = run_rank(engine, adapter) if ranked else serve(engine, adapter)
    return texts, launches.seen


def run_rank(engine: PagedEngine, adapter: Any) -> Texts:
    messages: Any = Messages()
    if dist.get_rank():
        _compute_steps(messages, engine)
        return {}
    first = object.__new__(ShardedEngine)
    first._engine, first._sent, first._followers = engine, SentSequences(), [messages]
    first._send = messages.send  # type: ignore[method-assign]
    texts = serve(first, adapter)
    messages.send(Shutdown())
    return texts
