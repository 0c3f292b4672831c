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
from pathlib import Path

from harness import Server, failure, server_environment, unary_request
from repository import TEST_CACHE

from demo.fake_model import make_fake_model

FILLING = b"x" * mmap.PAGESIZE  # the smallest pipe


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x")
    os.set_blocking(pipe, True)


def test_a_server_whose_log_nobody_reads_serves_and_ends(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    assert fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, len(FILLING)) == len(FILLING)
    fill(writing)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        grpc_port, http_port = one.getsockname()[1], other.getsockname()[1]
    options = {"GRPC_PORT": grpc_port, "PORT": http_port, "BIND_ADDRESS": "127.0.0.1", "JSON_OUTPUT": "true"}
    options |= {"MODEL_NAME": make_fake_model(tmp_path, crash_token=0), "DEPLOYMENT_FRAMEWORK": "fake"}
    environ = server_environment(**options, CACHE_DIR=TEST_CACHE)
    command = [sys.executable, "-P", "-m", "tgis", "serve"]
    with subprocess.Popen(command, env=environ, stdout=writing, stderr=writing) as process:
        server = Server(process, grpc_port, http_port, http_port, tmp_path)
        try:
            server.wait_for_health(200)
            with server.stub() as stub:
                failure(lambda: stub.Generate(unary_request("!"), timeout=20))  # the engine process logs why
                for _ in range(20):
                    assert stub.Generate(unary_request("abc", 3), timeout=20).responses[0].text == "abc"
            assert os.read(reading, len(FILLING)) == FILLING  # not one line has fitted, and now all come
            log, processes = b"", set[str | None]()
            while log.count(b"single request: 3 tokens") < 20 or "engine" not in processes:  # it may be last
                log += os.read(reading, 1 << 16)
                if log.endswith(b"\n"):
                    processes = {json.loads(line).get("process") for line in log.splitlines()}
            assert processes == {None, "engine"}
            fill(writing)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
    os.close(reading)
    os.close(writing)
