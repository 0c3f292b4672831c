"""The engine core with the fake engine: whose masks are abandoned, the size of messages about input tokens, limits."""

from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from batches import engine_options, limits
from scripted_channel import ScriptedChannel, run_core

from demo.fake_model import make_fake_model
from tgis.engine_core.main import batch_limits
from tgis.engines.fake import FakeEngine
from tgis.ipc.messages import Cancel, GetBatchState, PromptLogprobs, Shutdown, Step, Submit
from tgis.ipc.request import LogprobOptions, Request

LIMITS = limits(weight=10_000)
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
    channel = ScriptedChannel([GetBatchState()], [], [GetBatchState()])
    with mock.patch("tgis.engine_core.core.return_unused_memory") as trim:
        run(tmp_path, channel, idle_seconds=idle_seconds, engine=Engine)
    assert (channel.timeouts, len(releases), trim.call_count) == (timeouts, released, released)


def test_masks_of_cancelled_outputs_are_abandoned(tmp_path: Path) -> None:
    """Not those of others, which go on."""
    grammars = {id_: mock.Mock(in_thread=False) for id_ in (1, 2)}
    for grammar in grammars.values():
        grammar.allowed_ids.return_value = [5]
    submit = Submit([Request(id_, [5, 6], 9, grammar=id_) for id_ in grammars], 0.0)
    channel = ScriptedChannel([submit], [Cancel([1])], [], [Shutdown()])
    run(tmp_path, channel, mock.Mock(found=lambda id_: mock.Mock(copy=lambda: grammars[id_])))
    assert [grammar.abandon.call_count for grammar in grammars.values()] == [1, 0]


@pytest.mark.parametrize("top_n", [0, 10, 200])
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


@pytest.mark.parametrize(("encoder_decoder", "block_size"), [(False, 0), (True, 0), (False, 16), (True, 16)])
def test_inputs_of_an_encoder_decoder_with_blocks_are_whole(
    encoder_decoder: bool, block_size: int, tmp_path: Path
) -> None:
    options = engine_options(make_fake_model(tmp_path), 4)
    changes = {"encoder_decoder": encoder_decoder, "block_size": block_size}
    bounds = batch_limits(options, msgspec.structs.replace(FakeEngine(options).info, padded=False, **changes))
    assert bounds.encoder_decoder == (encoder_decoder and block_size > 0)
