"""A server and its limit of open files: raised at start, and used up by connections that say nothing."""

import contextlib
import os
import resource
import socket
from pathlib import Path

import grpc
import pytest
from harness import Server, running_fake, unary_request, wait_until

from tgis.cli.serve import MAX_OPEN_FILES, raise_file_limit
from tgis.pb import generation_pb2_grpc as pb_grpc


def test_the_soft_limit_is_raised_to_the_hard_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = len(os.listdir("/proc/self/fd")) + 100
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        for _ in range(2):
            raise_file_limit()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [record.getMessage() for record in caplog.records] == [f"limit of open files raised from {low} to {wanted}"]


def test_calls_go_on_and_the_server_recovers_when_all_files_are_open(tmp_path: Path) -> None:
    with running_fake(tmp_path) as server, server.stub() as stub:
        assert stub.Generate(unary_request("abc", 3)).responses[0].text == "abc"
        limit = open_files(server) + 10
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        with contextlib.ExitStack() as connections:
            for port in (server.http_port, server.grpc_port) * 40:
                connection = connections.enter_context(socket.socket())
                connection.setblocking(False)  # the queue of the port may be full
                connection.connect_ex(("127.0.0.1", port))
            wait_until(lambda: open_files(server) >= limit, "use of all files")
            for _ in range(50):
                assert stub.Generate(unary_request("abc", 3), timeout=20).responses[0].text == "abc"
        server.wait_for_health(200)
        with grpc.insecure_channel(server.target) as channel:
            new = pb_grpc.GenerationServiceStub(channel)
            assert new.Generate(unary_request("abc", 3), timeout=20, wait_for_ready=True).responses[0].text == "abc"
        assert server.stop() == 0
        assert len(server.log.read_text().splitlines()) < 200


def open_files(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))
