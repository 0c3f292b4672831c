"""On real GPUs: ranks compile, capture and launch steps ahead as an engine without ranks does."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from batches import engine_options, limits
from tiny_models import generate_all, greedy_requests, make_model, tgis_warnings

from tgis.engines.distributed.engine import ShardedEngine
from tgis.engines.loading import loader
from tgis.engines.paged.engine import PagedEngine
from tgis.engines.sharding.collectives import TorchCollectives
from tgis.engines.sharding.sharded_model import Sharding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # of libraries: versions differ on GPU machines
]


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_keep_graphs_compiled_layers_and_steps_in_flight(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over NCCL, also where there is one: its layers reduce, and its tokens are broadcast."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    options = engine_options(make_model("Llama", tmp_path), 4, num_threads=2, engine="tgis_native")
    requests = greedy_requests(12, 20, random.Random(1))
    bounds = limits(200, padded=False, block_size=16, max_batch_size=4, prefill_tokens=7, lookahead=1)
    expected = generate_all(PagedEngine(options), bounds, requests, random.Random(1))
    monkeypatch.setattr(loader, "_sharding", lambda size, *_, **__: Sharding(size[0], TorchCollectives()))
    ranks = ShardedEngine(msgspec.structs.replace(options, num_shards=count), pytest.fail, print)
    try:
        engine = ranks._engine
        assert isinstance(engine, PagedEngine)
        assert engine.runner.model.sharding
        ahead, launch_next = list[int](), engine._decoder.launch_next
        assert launch_next

        def launch(seqs: Any, *others: Any) -> Any:
            ahead.append(len(seqs))
            return launch_next(seqs, *others)

        engine._decoder.launch_next = launch
        assert generate_all(ranks, bounds, requests, random.Random(1)) == expected
        assert engine.runner.compiled is not None
        assert engine.runner.graphs is not None
        assert len(ahead) > 20
    finally:
        ranks.close()
    assert tgis_warnings(caplog) == []  # nothing runs eagerly
