"""A real Prometheus scrapes a server with TLS under load, and evaluates every expression of deployment/."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import expressions
import yaml
from expressions import Expression
from schemas import TOOLS

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "tests" / "support")]

import grpc  # noqa: E402
from harness import Server, running_fake, unary_request, wait_until  # noqa: E402

from benchmarks.certificates import make_pair  # noqa: E402
from tgis.pb import generation_pb2_grpc as pb_grpc  # noqa: E402

LOAD_SECONDS = 12  # a dozen scrapes
LABELS = {"namespace": "default", "pod": "inference-server-0"}


def problems() -> list[str]:
    """The expressions that give no data, but for those of metrics that are not here."""
    with tempfile.TemporaryDirectory(dir=TOOLS) as name:
        directory = Path(name)
        authority = make_pair()
        pair = make_pair(authority)
        for file, content in (("tls.crt", pair.cert), ("tls.key", pair.key)):
            (directory / file).write_bytes(content)
        tls = {"TLS_CERT_PATH": directory / "tls.crt", "TLS_KEY_PATH": directory / "tls.key"}
        with running_fake(directory, {}, MAX_BATCH_SIZE=4, **tls) as server:
            if (status := server.get("/health")[0]) != 200:
                return [f"/health: {status}"]
            with _prometheus(directory, server.http_port) as port, _load(server, authority.cert):
                time.sleep(LOAD_SECONDS)
                assert _problem(port, Expression("planted", "tgi_queue_sizes"))
                return [problem for each in expressions.every_expression() if (problem := _problem(port, each))]


def _problem(port: int, expression: Expression) -> str:
    if expression.metrics & (expressions.KUBELET | expressions.ADAPTERS):
        return ""
    query = urllib.parse.urlencode({"query": expression.text})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}") as answer:
        found = json.load(answer)["data"]["result"]
    return "" if found else f"{expression.origin}: no data for {expression.text}"


@contextlib.contextmanager
def _prometheus(directory: Path, target: int) -> Iterator[int]:
    scrape = {
        "job_name": "inference-server",
        "static_configs": [{"targets": [f"127.0.0.1:{target}"], "labels": LABELS}],
    }
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    command = [
        str(TOOLS / "bin/prometheus"),
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready").status == 200, "Prometheus")
        yield port
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _load(server: Server, authority: bytes) -> Iterator[None]:
    """Calls of 200 tokens by eight clients until the block ends: twice a full batch."""
    ended = threading.Event()

    def call() -> None:
        credentials = grpc.ssl_channel_credentials(authority)
        with grpc.secure_channel(server.target, credentials) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            while not ended.is_set():
                stub.Generate(unary_request("once upon a time " * 10, 200), timeout=30)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    raise SystemExit("\n".join(problems()))
