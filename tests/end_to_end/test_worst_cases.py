"""What the most expensive message in each field costs a real server: event loop, memory and reply."""

import asyncio
import functools
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
import pytest
from harness import Server, running_module
from measured_server import LoopMeter
from repository import REPOSITORY, python_path
from worst_cases import RPCS, WorstCase, worst_cases

from demo.fake_model import make_fake_model

MAX_LENGTH = 4096
PATHS = REPOSITORY, REPOSITORY / "tests" / "support"
WATCH_SECONDS = 0.2  # a stream without end is left after that
PROPER = {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "NOT_FOUND", "still open"}
PROPER |= {"200", "400", "422"}  # of HTTP


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call costs the front end."""

    status: str
    callback: float  # seconds of the CPU that one callback held the event loop, at most
    lag: float  # seconds by which the loop was late, at most; whatever else the machine does counts, too
    memory: int  # bytes at the peak beyond those before
    reply: int  # bytes of all messages


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    server: Server
    meter: LoopMeter

    def cost(self, case: WorstCase) -> Cost:
        process = Path("/proc", str(self.server.process.pid))
        (process / "clear_refs").write_text("5")  # forget the peak
        before = memory(process, "VmRSS")
        self.meter.reset()
        status, reply = asyncio.run((post if case.path else call)(self.server, case))
        callback, lag = self.meter.read()
        return Cost(status, callback, lag, memory(process, "VmHWM") - before, reply)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeasuredServer]:
    directory = tmp_path_factory.mktemp("worst")
    model = make_fake_model(directory / "model", MAX_LENGTH)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    meter = LoopMeter.create(directory / "meter")
    command = ["measured_server", str(directory / "meter")]
    with running_module(
        command, directory, MODEL_NAME=model, DEPLOYMENT_FRAMEWORK="fake", PYTHONPATH=python_path(*PATHS)
    ) as server:
        yield MeasuredServer(server, meter)


@functools.cache
def all_cases() -> list[WorstCase]:
    """Made by the tests, not at import: they take seconds and hundreds of megabytes."""
    return list(worst_cases(MAX_LENGTH))


def memory(process: Path, name: str) -> int:
    """Bytes."""
    (line,) = [line for line in (process / "status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


async def call(server: Server, case: WorstCase) -> tuple[str, int]:
    """The status, and the bytes of the reply."""
    size, options = 0, [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(server.target, options=options) as channel:
        stream = channel.stream_stream(f"/{case.method}", bytes, bytes)(iter([case.data]), timeout=120)
        try:
            async with asyncio.timeout(WATCH_SECONDS if case.method.endswith("Watch") else None):
                async for message in stream:
                    size += len(message)
        except grpc.aio.AioRpcError as error:
            return error.code().name, size
        except TimeoutError:
            return "still open", size
    return "OK", size


async def post(server: Server, case: WorstCase) -> tuple[str, int]:
    """The status, and the bytes of the reply."""
    url, headers = f"http://localhost:{server.http_port}{case.path}", {"content-type": "application/json"}
    async with aiohttp.ClientSession() as http, http.post(url, data=io.BytesIO(case.data), headers=headers) as answer:
        return str(answer.status), len(await answer.read())


def test_there_is_a_case_for_every_rpc() -> None:
    assert {case.method for case in all_cases() if not case.path} == RPCS.keys()


def test_no_field_holds_the_event_loop_or_takes_much_memory(measured: MeasuredServer) -> None:
    check({case: measured.cost(case) for case in all_cases() if not case.is_slow})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_combination_of_fields_does(measured: MeasuredServer) -> None:
    """Prints what docs/limits.md shows the worst of."""
    costs = {case: measured.cost(case) for case in all_cases()}
    print(table(costs))
    check(costs)


def check(costs: dict[WorstCase, Cost]) -> None:
    """The ceilings leave room for slow machines: they are about five times what is measured."""
    assert max(cost.callback for cost in costs.values()) > 0, "the loop is not measured"
    for case, cost in costs.items():
        assert cost.status in PROPER, (case, cost)
        assert cost.callback < (0.2 if case.is_slow else 0.1), (case, cost)
        # The library takes about 200 bytes for a byte of a text of which every character is a token.
        assert cost.memory < (512 << 20 if case.is_slow else 128 << 20) + 256 * len(case.data), (case, cost)
        assert cost.reply < (1 << 20) + 16 * len(case.data) + (16 << 20 if case.is_slow else 0), (case, cost)


def table(costs: dict[WorstCase, Cost]) -> str:
    rows = [
        f"| {case} | {cost.status} | {cost.callback * 1e3:.0f} | {cost.lag * 1e3:.0f} "
        f"| {cost.memory / 2**20:.0f} | {cost.reply / 2**20:.1f} |"
        for case, cost in costs.items()
    ]
    head = ["| RPC and field | Status | Callback, ms of CPU | Lag, ms | Memory, MiB | Reply, MiB |", "|---" * 6 + "|"]
    return "\n".join(["", *head, *rows])
