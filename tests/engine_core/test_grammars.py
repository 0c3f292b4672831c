"""The engine core and the masks of grammars."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from batches import EOS, engine_options, limits

from demo.fake_model import make_fake_model
from tgis.batcher.batcher import Batcher
from tgis.engine_core.core import EngineCore
from tgis.engines.fake import FakeEngine
from tgis.ipc.messages import Cancel, Shutdown, Submit
from tgis.ipc.request import Request

if TYPE_CHECKING:
    from tgis.ipc.channel import Channel


def test_masks_of_cancelled_outputs_are_abandoned(tmp_path: Path) -> None:
    """Not those of others, which go on."""
    engine = FakeEngine(engine_options(make_fake_model(tmp_path), 4, threads=1))
    grammars = {id_: mock.Mock(in_thread=False) for id_ in (1, 2)}
    for grammar in grammars.values():
        grammar.allowed_ids.return_value = [5]
    turns: list[list[Any]] = [
        [Submit([Request(id_, [5, 6], 9, grammar=id_) for id_ in grammars], 0.0)],
        [Cancel([1])],
        [],
        [Shutdown()],
    ]
    channel = mock.Mock(receive=lambda *, wait: turns.pop(0))
    compiler: Any = mock.Mock(matcher=grammars.__getitem__)
    batcher = Batcher(limits(weight=10_000), {EOS})
    EngineCore(cast("Channel", channel), engine, batcher, grammars=compiler).run()
    assert [grammar.abandon.call_count for grammar in grammars.values()] == [1, 0]
