"""The engine core with the fake engine: whose masks are abandoned, the size of messages about input tokens, limits."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from batches import EOS, engine_options, limits
from msgspec.structs import replace
from scripted_channel import ScriptedChannel, run_core

from demo.fake_model import make_fake_model
from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import StepPlan
from tgis.engine_core import core
from tgis.engine_core.main import _resident_cache_bytes, _token_table, batch_limits
from tgis.engines.base import StepResult
from tgis.engines.fake import FakeEngine
from tgis.errors import StartError
from tgis.ipc.lookups import Vocabulary
from tgis.ipc.messages import (
    Cancel,
    Failed,
    FailureKind,
    FlushCache,
    GetBatchState,
    PromptLogprobs,
    Shutdown,
    Step,
    Submit,
)
from tgis.ipc.request import LogprobOptions, Request, StopReason, TokenLogprobs
from tgis.structured_output.matcher import MaskThreads

LIMITS, PAGED = limits(weight=10_000), limits(padded=False, block_size=4)
MAX_BYTES = 1 << 16  # of a message


def run(
    directory: Path, channel: ScriptedChannel, lookups: Any = None, idle_seconds: float = 0, engine: type = FakeEngine
) -> None:
    run_core(channel, engine(engine_options(make_fake_model(directory), 4)), LIMITS, lookups, idle_seconds)


@pytest.mark.parametrize(
    ("idle_seconds", "timeouts", "released"), [(0, [None] * 4, 0), (7.5, [7.5, 7.5, None, 7.5], 1)]
)
def test_memory_is_given_back_when_nothing_has_arrived_for_long(
    idle_seconds: float, timeouts: list[float | None], released: int, tmp_path: Path
) -> None:
    """Once, until something arrives."""

    class Engine(FakeEngine):
        def clear_cache(self) -> bool:
            releases.append(self)
            return True

    releases: list[Engine] = []
    channel = ScriptedChannel([GetBatchState()], [], [FlushCache()])
    trim, forget = mock.patch.object(core, "return_unused_memory"), mock.patch.object(Batcher, "forget_cached_prefixes")
    with trim as trimmed, forget as forgotten, mock.patch.object(Batcher, "flush_cache") as flushed:
        run(tmp_path, channel, idle_seconds=idle_seconds, engine=Engine)
    assert (channel.timeouts, len(releases)) == (timeouts, released)
    assert trimmed.call_count == forgotten.call_count == released
    assert flushed.call_count == 1


def test_masks_of_outputs_that_have_ended_are_abandoned(tmp_path: Path) -> None:
    """Not those of others, whose next masks are made and waited for if nothing else runs."""
    grammars, prepared = {id_: mock.Mock(in_thread=False) for id_ in (1, 2, 3)}, []
    for grammar in grammars.values():
        grammar.allowed_ids.return_value = [5]

    def prepare(pairs: Any) -> None:
        prepared.append([*pairs])
        grammars[2].ready = False

    submit = Submit([Request(id_, [5, 6], 1 if id_ == 3 else 9, grammar=id_) for id_ in grammars], 0.0)
    channel = ScriptedChannel([submit], [Cancel([1])], [], [], [Shutdown()])
    lookups = mock.Mock(found=lambda id_: mock.Mock(copy=lambda: grammars[id_]))
    wait = mock.Mock(side_effect=lambda: setattr(grammars[2], "ready", True))
    threads = {"prepare": mock.Mock(side_effect=prepare), "wait": wait, "close": mock.Mock()}
    with mock.patch.multiple(MaskThreads, **threads):
        run_core(channel, FakeEngine(engine_options(make_fake_model(tmp_path))), PAGED, lookups)
    assert (wait.call_count, threads["close"].call_count) == (2, 1)
    assert [grammar.abandon.call_count for grammar in grammars.values()] == [1, 0, 1]
    assert lookups.release.mock_calls == [mock.call([1])]
    assert prepared == [[(grammars[1], [5]), (grammars[2], [5])], [(grammars[2], [5, 5])]]


def test_tokens_are_sent_up_to_the_end_and_failures_before_them(tmp_path: Path) -> None:
    details = [TokenLogprobs(-float(n)) for n in range(3)]
    failed = {2: (FailureKind.GRAMMAR, "none left")}
    results = [StepResult([[5], [6]], [], failed=failed), StepResult([[5, EOS, 7]], [details])]
    channel = ScriptedChannel([Submit([Request(1, [5], 9), Request(2, [5], 9)], 0.0)], [], [Shutdown()])
    with mock.patch.object(FakeEngine, "step", side_effect=results):
        run(tmp_path, channel)
    assert channel.messages[0] == Failed([2], *failed[2])
    assert [replace(step, stats=None) for step in channel.messages[1:]] == [
        Step([1], [[5]], [StopReason.NOT_FINISHED], [], None),
        Step([1], [[5, EOS]], [StopReason.EOS_TOKEN], [details[:2]], None),
    ]
    with mock.patch.object(FakeEngine, "step", side_effect=StartError("lost")), pytest.raises(StartError, match="lost"):
        run(tmp_path, ScriptedChannel([Submit([Request(1, [5], 9)], 0.0)]))


@pytest.mark.parametrize("top_n", [0, 10, 200, 3000])
def test_many_details_come_in_many_messages(tmp_path: Path, top_n: int) -> None:
    options = LogprobOptions(input_tokens=True, logprobs=True, ranks=True, top_n_tokens=top_n)
    prompts = {1: [5, 6, 7] * 700, 2: [9], 3: list(range(100))}
    requests = [Request(id_, tokens, 1, logprob_options=options) for id_, tokens in prompts.items()]
    channel = ScriptedChannel([Submit(requests, 0.0)])
    run(tmp_path, channel)
    *parts, step = channel.messages
    assert isinstance(step, Step)
    assert max(channel.frames) < MAX_BYTES
    for id_, tokens in prompts.items():
        mine = [part for part in parts if isinstance(part, PromptLogprobs) and part.id == id_]
        logprobs = [one for part in mine for one in part.decode()]
        assert sum(part.num_tokens for part in mine) == len(tokens)
        assert [len(one.top_logprobs) for one in logprobs] == [top_n] * len(tokens)
        assert not top_n or [one.top_logprobs[0][0] for one in logprobs] == tokens


def test_limits_are_those_of_the_engine_and_of_the_options(tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_prefill_padding": 0.25, "prefix_cache": True, "max_waiting_tokens": 7}
    sizes = {"max_batch_size": 5, "token_capacity": 4096, "max_prefill_tokens": 600, "block_size": 16}
    sizes |= {"proposed_tokens": 3, "drafted_tokens": 2, "vocab_size": 800, "max_prefill_gap_ms": 90}
    options = engine_options(make_fake_model(tmp_path), **given)
    info = replace(FakeEngine(options).info, encoder_decoder=True, **sizes)
    limits = BatchLimits(5, 4096, 600, 0.25, False, 16, True, 0, 90, 7, True, 3, 2, 5, 0, 800)
    assert batch_limits(options, info) == limits
    no_blocks: dict[str, Any] = {"proposed_tokens": 0, "block_size": 0}
    for changes, asked, expected in (
        ({}, {"max_prefill_tokens": 500, "max_prefill_gap_ms": 40}, {"prefill_tokens": 500, "max_prefill_gap_ms": 40}),
        ({}, {"max_prefill_tokens": 700, "speculator_max_batch_size": 2}, {"max_drafting": 2}),
        ({"proposed_tokens": 0, "state_slots": 9}, {}, {"proposed_tokens": 0, "state_slots": 9}),
        ({"proposed_tokens": 0, "lookahead": 1}, {}, {"proposed_tokens": 0, "lookahead": 1}),
        (no_blocks, {}, no_blocks | {"encoder_decoder": False}),
    ):
        found = batch_limits(replace(options, **asked), replace(info, **changes))
        assert found == dataclasses.replace(limits, **dict[str, Any](expected))


def test_what_a_start_knows_of_the_model(tmp_path: Path) -> None:
    info, words = FakeEngine(engine_options(make_fake_model(tmp_path))).info, Vocabulary([b"a", b"b"])
    ended = _token_table(words, info, [1]) is None, _token_table(words, info, []) is None
    assert (*ended, _token_table(Vocabulary([]), info, [1])) == (False, True, None)
    batcher = mock.Mock(touched_share=0.25)
    sizes = [
        _resident_cache_bytes(replace(info, kv_cache_bytes=80, device=name), batcher) for name in ("cpu", "cuda:0")
    ]
    assert sizes == [20, 80]  # blocks take memory on CPUs when they are used


def test_a_request_that_expires_in_the_queue_ends_without_a_token(tmp_path: Path) -> None:
    channel = ScriptedChannel([Submit([Request(1, [5], 2), Request(2, [6], 2, deadline=0.0)], 0.0)], [], [Shutdown()])
    run_core(channel, FakeEngine(engine_options(make_fake_model(tmp_path))), limits(max_batch_size=1))
    first, expired, *_ = channel.messages
    assert (first.ids, first.tokens) == ([1], [[5]])
    assert expired == Step([2], [[]], [StopReason.TIME_LIMIT], [], None)


class Broken(FakeEngine):
    def step(self, plan: StepPlan) -> StepResult:
        raise RuntimeError("broken")


def test_what_breaks_a_step_is_told_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    channel = ScriptedChannel([Submit([Request(1, [5], 2)], 0.0)], [], [], [Shutdown()])
    run(tmp_path, channel, engine=Broken)
    told = FailureKind.ERROR, "RuntimeError: broken", True
    assert channel.messages == [Failed([], *told), Failed([1], *told)]
    error, again = "a step of 1 sequences failed", "{} sequences of a failed step (error) will be retried"
    assert caplog.messages == [error, again.format(1), error, again.format(0)]
    assert caplog.records[0].exc_info
