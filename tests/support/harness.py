"""A real server process for tests, and requests to it."""

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import grpc
from chat_templates import write_template
from repository import TEST_CACHE

from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

_PORTS = re.compile(r"gRPC (\d+) \([\w ,]+\), health and metrics (\d+), HTTP APIs (\d+|off)")

P = ParamSpec("P")


def run_async(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in its own event loop."""

    @functools.wraps(test)
    def in_loop(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return in_loop


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    """A connection that fails is no answer."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        assert time.monotonic() < until, f"no {what} within {seconds} s"
        time.sleep(0.02)


def failure(action: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """The status that a call ends with, and what it says."""
    try:
        action()
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("the call has succeeded")


@dataclass
class Server:
    """A server process that has logged that it is ready."""

    process: subprocess.Popen[bytes]
    grpc_port: int
    http_port: int  # of probes
    api_port: int | None
    log: Path

    @property
    def target(self) -> str:
        return f"localhost:{self.grpc_port}"

    @contextlib.contextmanager
    def stub(self) -> Iterator[pb_grpc.GenerationServiceStub]:
        with grpc.insecure_channel(self.target) as channel:
            yield pb_grpc.GenerationServiceStub(channel)

    def get(self, path: str, timeout: float = 10, **headers: str) -> tuple[int, str]:
        """Status and body of an HTTP request."""
        return self._ask(path, None, headers, timeout)

    def post(self, path: str, body: Any, timeout: float = 60, **headers: str) -> tuple[int, Any]:
        """Status and JSON, or events, of an HTTP request with a body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, text = self._ask(path, data, headers | {"Content-Type": "application/json"}, timeout)
        return status, text if text.startswith("data:") else json.loads(text)

    def _ask(self, path: str, data: bytes | None, headers: dict[str, str], timeout: float) -> tuple[int, str]:
        request = urllib.request.Request(f"http://localhost:{self.http_port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """The value of a metric, by its name and labels."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Values from one scrape; the next may have to wait a quarter of a second."""
        values = dict(line.rsplit(" ", 1) for line in self.get("/metrics")[1].splitlines())
        return [float(values[name]) for name in names]

    def wait_for_metric(self, sample: str) -> None:
        """Until /metrics has this line."""
        wait_until(lambda: sample in self.get("/metrics")[1].splitlines(), sample)

    def wait_for_health(self, status: int) -> str:
        """Until /health answers so; its body."""
        wait_until(lambda: self.get("/health")[0] == status, f"/health {status}")
        return self.get("/health")[1]

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [int(c) for c in children if b"tgis.engine_core.main" in Path(f"/proc/{c}/cmdline").read_bytes()]
        return pid

    def stop(self, timeout: float = 40) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


def server_environment(**options: object) -> dict[str, str]:
    """This process's environment plus server options."""
    return os.environ | {"PYTHONUNBUFFERED": "1"} | {name: str(value) for name, value in options.items()}


def running_server(
    directory: Path, model: Path, timeout: float = 120, **options: object
) -> contextlib.AbstractContextManager[Server]:
    """Serve `model`, logging to `directory`; killed at the end of the block."""
    return running_module(["tgis", "serve"], directory, timeout, **{"MODEL_NAME": model, **options})


def fake_model(directory: Path, steps: dict[str, Any] | None, template: str | None) -> Path:
    """A model of the engine `fake`, which repeats its prompt, with a chat template if one is given."""
    model = make_fake_model(directory / "model", **(steps or {}))
    if template is not None:
        write_template(model, template)
    return model


def running_fake(
    directory: Path, steps: dict[str, Any] | None = None, template: str | None = None, /, **options: Any
) -> contextlib.AbstractContextManager[Server]:
    """Serve a model of the engine `fake`, which repeats its prompt."""
    model = fake_model(directory, steps, template)
    return running_server(directory, model, **{"DEPLOYMENT_FRAMEWORK": "fake", **options})


def running_module(
    arguments: list[str], directory: Path, timeout: float = 120, **options: object
) -> contextlib.AbstractContextManager[Server]:
    """A server that `python -m` starts with these arguments."""
    return running_command([sys.executable, "-P", "-m", *arguments], directory, timeout, None, **options)


@contextlib.contextmanager
def running_command(
    command: list[str], directory: Path, timeout: float = 120, cwd: Path | None = None, **options: object
) -> Iterator[Server]:
    """A server that this command starts, in a process group of its own: it may be a child of the command."""
    log = directory / "server.log"
    settings = {"GRPC_PORT": 0, "PORT": 0, "BIND_ADDRESS": "127.0.0.1"}
    # measuring memory would take longer than most tests; one thread, because other servers and tests run beside it
    settings |= {"ESTIMATE_MEMORY": "off", "NUM_THREADS": 1, "CACHE_DIR": TEST_CACHE} | options
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=server_environment(**settings),
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        ports = _wait_for_ports(process, log, timeout)
        yield Server(process, *ports, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for_ports(process: subprocess.Popen[bytes], log: Path, timeout: float) -> tuple[int, int, int | None]:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if found := _PORTS.search(log.read_text()):
            return int(found[1]), int(found[2]), None if found[3] == "off" else int(found[3])
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise AssertionError(f"no server (exit code {process.poll()}):\n{log.read_text()}")


def unary_request(text: str, max_new_tokens: int = 20, **stopping: Any) -> pb.BatchedGenerationRequest:
    """A unary request with one input."""
    return pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=text)],
        params=pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens, **stopping)),
    )


def as_stream_request(request: pb.BatchedGenerationRequest) -> pb.SingleGenerationRequest:
    """The same request for GenerateStream."""
    (one,) = request.requests
    shared = {field.name: value for field, value in request.ListFields() if field.name != "requests"}
    return pb.SingleGenerationRequest(request=one, **shared)


def adapter_request(text: str, max_new_tokens: int, **adapter: Any) -> pb.BatchedGenerationRequest:
    """A unary request for output tokens with a `prefix_id` or an `adapter_id`."""
    request = unary_request(text, max_new_tokens)
    request.MergeFrom(pb.BatchedGenerationRequest(**adapter))
    request.params.response.generated_tokens = True
    return request


def output_tokens(stub: pb_grpc.GenerationServiceStub, request: pb.BatchedGenerationRequest) -> list[str]:
    """The tokens generated for the only input."""
    (response,) = stub.Generate(request, timeout=60).responses
    return [token.text for token in response.tokens]
