"""benchmarks.front_end: its peer, the bare gRPC server, and the count of messages."""

import asyncio

from benchmarks.front_end import bare_server, stream


def test_the_bare_server_sends_a_message_for_each_token() -> None:
    with bare_server(step_seconds=0.001, output_tokens=5) as (_, target):
        assert asyncio.run(stream(target, streams=3, output_tokens=5)) == 15
