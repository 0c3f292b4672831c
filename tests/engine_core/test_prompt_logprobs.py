"""What was asked about input tokens crosses the socket in messages of a bounded size, before the first token."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from batches import EOS, engine_options, limits

from demo.fake_model import make_fake_model
from tgis.batcher.batcher import Batcher
from tgis.engine_core.core import EngineCore
from tgis.engines.fake import FakeEngine
from tgis.ipc.channel import FrameReader, encode_frame
from tgis.ipc.messages import FromEngine, PromptLogprobs, Shutdown, Step, Submit
from tgis.ipc.request import LogprobOptions, Request

if TYPE_CHECKING:
    from tgis.ipc.channel import Channel

MAX_BYTES = 1 << 16  # of a message


class Recorder:
    """Gives the engine one call, and keeps what it sends as the front end reads it."""

    def __init__(self, requests: list[Request]) -> None:
        self._turns: list[list[Any]] = [[Submit(requests, time.monotonic())], [Shutdown()]]
        self._reader = FrameReader(FromEngine)
        self.frames: list[int] = []
        self.messages: list[Any] = []

    def receive(self, *, wait: bool) -> list[Any]:
        return self._turns.pop(0) if self._turns[1:] or wait else []

    def send(self, message: Any) -> None:
        frame = encode_frame(message)
        self.frames.append(len(frame))
        self.messages += self._reader.feed(frame)


@pytest.mark.parametrize("top_n", [0, 10, 200])
def test_many_details_come_in_many_messages(tmp_path: Path, top_n: int) -> None:
    options = LogprobOptions(input_tokens=True, logprobs=True, ranks=True, top_n_tokens=top_n)
    prompts = {1: [5, 6, 7] * 700, 2: [9], 3: list(range(100))}
    recorder = Recorder([Request(id_, tokens, 1, logprob_options=options) for id_, tokens in prompts.items()])
    engine = FakeEngine(engine_options(make_fake_model(tmp_path), 4, threads=1))
    EngineCore(cast("Channel", recorder), engine, Batcher(limits(weight=10_000), {EOS})).run()
    *parts, step = recorder.messages
    assert isinstance(step, Step)
    assert max(recorder.frames) < MAX_BYTES
    for id_, tokens in prompts.items():
        mine = [part for part in parts if isinstance(part, PromptLogprobs) and part.id == id_]
        logprobs = [one for part in mine for one in part.decode()]
        assert sum(part.num_tokens for part in mine) == len(tokens)
        assert [len(one.top_logprobs) for one in logprobs] == [top_n] * len(tokens)
        assert not top_n or [one.top_logprobs[0][0] for one in logprobs] == tokens
