"""Two replicas restarted under load, as in a rollout."""

import asyncio

import pytest

from benchmarks.rolling_restarts import main


@pytest.mark.slow
def test_no_call_is_lost_and_no_stream_is_broken() -> None:
    assert asyncio.run(main(4))
