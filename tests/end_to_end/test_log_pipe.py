"""A server whose log nobody reads: stdout and stderr are a pipe that is full from the start."""

import contextlib
import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from harness import server_environment, unary_request, wait_until
from repository import TEST_CACHE

from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2_grpc as pb_grpc

FILLING = b"x" * mmap.PAGESIZE  # the smallest pipe


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A full one: where it is read, and where it is written."""
    reading, writing = os.pipe()
    size = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, len(FILLING))
    assert os.write(writing, b"x" * size) == size == len(FILLING)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x")
    os.set_blocking(pipe, True)


@contextlib.contextmanager
def serving(output: int, **options: object) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """A server once it is healthy; its process, its gRPC target and the address of its HTTP port."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        grpc_port, http_port = one.getsockname()[1], other.getsockname()[1]
    settings = options | {"GRPC_PORT": grpc_port, "PORT": http_port, "BIND_ADDRESS": "127.0.0.1"}
    command = [sys.executable, "-P", "-m", "tgis", "serve"]
    address = f"http://127.0.0.1:{http_port}"
    with subprocess.Popen(command, env=server_environment(**settings), stdout=output, stderr=output) as process:
        try:
            wait_until_healthy(address)
            yield process, f"127.0.0.1:{grpc_port}", address
        finally:
            process.kill()


def wait_until_healthy(address: str) -> None:
    wait_until(lambda: urllib.request.urlopen(f"{address}/health", timeout=5).status == 200, "health", 60)


def test_a_server_whose_log_nobody_reads_serves_and_ends(pipe: tuple[int, int], tmp_path: Path) -> None:
    reading, writing = pipe
    model = make_fake_model(tmp_path / "model", crash_token=0)
    options = {"MODEL_NAME": model, "DEPLOYMENT_FRAMEWORK": "fake", "CACHE_DIR": TEST_CACHE, "JSON_OUTPUT": "true"}
    with serving(writing, **options) as (process, target, address):
        with grpc.insecure_channel(target) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            with pytest.raises(grpc.RpcError, match="INTERNAL"):
                stub.Generate(unary_request("!"), timeout=20)  # the engine process logs why
            for _ in range(20):
                assert stub.Generate(unary_request("abc", 3), timeout=20).responses[0].text == "abc"
        wait_until_healthy(address)
        assert os.read(reading, len(FILLING)) == FILLING  # not one line has fitted, and now all come
        log, processes = b"", set[str | None]()
        while log.count(b"single request: 3 tokens") < 20 or "engine" not in processes:  # the engine's line may be last
            log += os.read(reading, 1 << 16)
            if log.endswith(b"\n"):
                processes = {json.loads(line).get("process") for line in log.splitlines()}
        assert processes == {None, "engine"}
        fill(writing)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
