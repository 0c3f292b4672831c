"""A bare grpc.aio server on uvloop: sends prebuilt messages, one per step, to all of its streams.

`python -m benchmarks.bare_grpc STEP_SECONDS TOKENS` prints its port.
"""

import asyncio
import sys
from typing import Any

import grpc
import uvloop

from tgis.pb import generation_pb2 as pb

METHOD = "/fmaas.GenerationService/GenerateStream"


class Steps:
    """All streams that wait wake up together, as after a step of an engine."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self._seconds
            await asyncio.sleep(due - loop.time())
            self._next.set_result(None)
            self._next = loop.create_future()

    async def wait(self) -> None:
        await self._next


async def main(seconds: float, num_tokens: int) -> None:
    steps = Steps(seconds)
    replies = [
        pb.GenerationResponse(text="a", generated_token_count=n).SerializeToString() for n in range(1, num_tokens + 1)
    ]

    async def stream(_requests: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        await context.read()
        for reply in replies:
            await steps.wait()
            await context.write(reply)

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    _, service, method = METHOD.split("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await steps.run()


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]), int(sys.argv[2])))
