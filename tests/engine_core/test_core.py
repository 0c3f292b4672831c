"""The engine core with the fake engine: whose masks are abandoned, and the size of messages about input tokens."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
from batches import EOS, engine_options, limits

from demo.fake_model import make_fake_model
from tgis.batcher.batcher import Batcher
from tgis.engine_core.core import EngineCore
from tgis.engines.fake import FakeEngine
from tgis.ipc.channel import FrameReader, encode_frame
from tgis.ipc.messages import Cancel, FromEngine, PromptLogprobs, Shutdown, Step, Submit
from tgis.ipc.request import LogprobOptions, Request

if TYPE_CHECKING:
    from tgis.ipc.channel import Channel

MAX_BYTES = 1 << 16  # of a message


class ScriptedChannel:
    """Gives the engine these messages, one turn before each step, and keeps what it sends as the front end reads it."""

    def __init__(self, *turns: list[Any]) -> None:
        self._turns = list(turns)
        self._reader = FrameReader(FromEngine)
        self.frames: list[int] = []
        self.messages: list[Any] = []

    def receive(self, *, wait: bool) -> list[Any]:
        return self._turns.pop(0) if self._turns else [Shutdown()] if wait else []

    def send(self, message: Any) -> None:
        frame = encode_frame(message)
        self.frames.append(len(frame))
        self.messages += self._reader.feed(frame)


def run(directory: Path, channel: ScriptedChannel, grammars: Any = None) -> None:
    engine = FakeEngine(engine_options(make_fake_model(directory), 4, threads=1))
    EngineCore(cast("Channel", channel), engine, Batcher(limits(weight=10_000), {EOS}), grammars=grammars).run()


def test_masks_of_cancelled_outputs_are_abandoned(tmp_path: Path) -> None:
    """Not those of others, which go on."""
    grammars = {id_: mock.Mock(in_thread=False) for id_ in (1, 2)}
    for grammar in grammars.values():
        grammar.allowed_ids.return_value = [5]
    submit = Submit([Request(id_, [5, 6], 9, grammar=id_) for id_ in grammars], 0.0)
    channel = ScriptedChannel([submit], [Cancel([1])], [], [Shutdown()])
    run(tmp_path, channel, mock.Mock(matcher=grammars.__getitem__))
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
