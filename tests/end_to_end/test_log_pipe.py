"""A server whose log nobody reads: stdout and stderr are a pipe that is full from the start."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
from harness import server_environment, unary_request
from repository import TEST_CACHE

from tgis.models.fake import make_fake_model
from tgis.pb import generation_pb2_grpc as pb_grpc

FILLING = b"x" * 4096


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        size = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, len(FILLING))
        assert os.write(writing, b"x" * size) == size == len(FILLING)
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


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
    until = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            assert time.monotonic() < until, "the server is not healthy after 60 s"
            time.sleep(0.05)


def test_a_server_whose_log_nobody_reads_serves_and_ends(tmp_path: Path) -> None:
    options = {"DEPLOYMENT_FRAMEWORK": "fake", "CACHE_DIR": TEST_CACHE, "JSON_OUTPUT": "true"}
    model = make_fake_model(tmp_path / "model")
    with (
        full_pipe() as (reading, writing),
        serving(writing, MODEL_NAME=model, **options) as (process, target, address),
    ):
        with grpc.insecure_channel(target) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            for _ in range(20):
                assert stub.Generate(unary_request("abc", 3), timeout=10).responses[0].text == "abc"
        wait_until_healthy(address)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert os.read(reading, 1 << 16) == FILLING  # not one line of the server fitted


def test_lines_are_written_once_somebody_reads(tmp_path: Path) -> None:
    options = {"DEPLOYMENT_FRAMEWORK": "fake", "CACHE_DIR": TEST_CACHE, "JSON_OUTPUT": "true"}
    model = make_fake_model(tmp_path / "model")
    with full_pipe() as (reading, writing), serving(writing, MODEL_NAME=model, **options) as (process, _, _):
        log = os.read(reading, len(FILLING))
        while b"serving " not in log:
            log += os.read(reading, 1 << 16)
        process.send_signal(signal.SIGTERM)
        while b"drained" not in log:
            log += os.read(reading, 1 << 16)
        assert process.wait(20) == 0
    assert all(json.loads(line) for line in log.removeprefix(FILLING).splitlines())


def test_a_server_that_cannot_start_ends_though_nobody_reads_why(tmp_path: Path) -> None:
    model = make_fake_model(tmp_path / "model", step_seconds="long")
    options = {"DEPLOYMENT_FRAMEWORK": "fake", "CACHE_DIR": TEST_CACHE, "GRPC_PORT": 0, "PORT": 0, "MODEL_NAME": model}
    command = [sys.executable, "-P", "-m", "tgis", "serve"]
    with full_pipe() as (_, writing):
        done = subprocess.run(
            command, env=server_environment(**options), stdout=writing, stderr=writing, timeout=60, check=False
        )
    assert done.returncode == 1
