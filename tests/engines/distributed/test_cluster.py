"""Ranks on several machines: how nodes find and prove each other, and two of them on loopback addresses."""

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from batches import engine_options
from cluster import Network, free_port, gone, running_cluster
from harness import as_stream_request, failure, unary_request
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tgis.engines.distributed.rendezvous import Joined, gather, join
from tgis.engines.distributed.secure_socket import SecureSocket, WrongSecret, open_secure, read_secret
from tgis.errors import StartError
from tgis.ipc.channel import encode_frame
from tgis.ipc.messages import EngineOptions

SECRET = b"16 bytes at least"


def test_two_nodes_answer_like_one_and_drain_together(glassllm_dir: Path, tmp_path: Path) -> None:
    with running_cluster(tmp_path, glassllm_dir, Network()) as servers, servers.stub() as stub:
        text = "The weather"
        assert stub.Generate(unary_request(text, 12)).responses[0].text == greedy_text(glassllm_dir, text, 12)
        stream = stub.GenerateStream(as_stream_request(unary_request(text, 100, min_new_tokens=100)))
        next(stream), next(stream)
        for node in reversed(servers.nodes):  # node 1 hears of it first, and serves on
            node.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].generated_token_count == 100
        assert servers.exit_codes(20) == [0, 0]


def greedy_text(model: Path, text: str, max_new_tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    output = reference.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)[0]
    decoded: str = tokenizer.decode(output[inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return decoded


@pytest.mark.slow
def test_a_rank_of_another_node_that_dies_ends_all(glassllm_dir: Path, tmp_path: Path) -> None:
    with running_cluster(tmp_path, glassllm_dir, Network()) as servers, servers.stub() as stub:
        node_0, node_1 = servers.nodes
        pids = [pid for node in servers.nodes for pid in node.pids()]
        stream = stub.GenerateStream(as_stream_request(unary_request("The weather", 100, min_new_tokens=100)))
        next(stream), next(stream)
        os.kill(node_1.pids()[1], signal.SIGKILL)
        code, reason = failure(lambda: list(stream))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "rank 1 of the engine on node 1" in reason
        assert servers.exit_codes(20) == [1, 1]
        assert gone(pids)
    assert "rank 1 of the engine on node 1" in node_0.reason
    assert "rank 1: the engine process was ended by signal 9" in node_1.reason


@pytest.fixture
def model(tmp_path: Path) -> Path:
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}" + bytes(9))
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    return tmp_path / "model"


def options_of(model: Path, node: int, port: int, **changes: Any) -> EngineOptions:
    cluster: dict[str, Any] = {"num_shards": 2, "nnodes": 2, "rank": node, "node_rank": node}
    cluster |= {"master_addr": "127.0.0.1", "master_port": port, "cluster_secret_path": str(model.parent / "secret")}
    return engine_options(model, 4, **cluster | changes)


@contextmanager
def gathering(model: Path) -> Iterator[tuple[int, Future[dict[int, SecureSocket]]]]:
    """A port on which rank 0 waits for rank 1, and what it will find."""
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(gather, options_of(model, 0, port))
        try:
            yield port, found
        finally:
            if not found.done():
                join_in_thread(options_of(model, 1, port, max_sequence_length=3)).exception(20)


def join_in_thread(options: EngineOptions) -> Future[tuple[SecureSocket, str]]:
    return ThreadPoolExecutor(1).submit(join, options)


def test_ranks_join_in_spite_of_strangers_and_wrong_secrets(model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(SECRET + b"2")
    with gathering(model) as (port, found):
        with pytest.raises(StartError, match="CLUSTER_SECRET_PATH is another on node 0"):
            join(options_of(model, 1, port, cluster_secret_path=str(tmp_path / "other")))
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)
        strangers[1].close()
        joining = join_in_thread(options_of(model, 1, port))
        links = found.result(20)
        assert [*links] == [1]
        links[1].sendall(encode_frame(Joined("a:1")))
        link, store = joining.result(20)
        assert store == "a:1"
        link.sendall(b"x" * 200_000)
        assert received(links[1], 200_000) == b"x" * 200_000
        with pytest.raises(ConnectionRefusedError):  # the port is closed again
            socket.create_connection(("127.0.0.1", port))
        for stranger in strangers:
            stranger.close()
        for each in (link, links[1]):
            each.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: {"max_sequence_length": 7}, "max_sequence_length is 7 on node 1, "),
        (lambda model: {"dtype": "float16"}, "dtype is float16 on node 1, float32 on node 0"),
        (lambda model: altered(model, "config.json", b"}", b" }"), "config.json is "),
        (lambda model: altered(model, "model.safetensors", b"{}", b"{ "), "model.safetensors is "),
        (lambda model: altered(model, "model.gguf", b"", b"GGUF"), "model.gguf is "),
        (
            lambda model: altered(model, "tokenizer.json", b"", b"{}"),
            "tokenizer.json is 44136fa355b3678a on node 1, missing",
        ),
    ],
)
def test_nodes_that_differ_end_both(model: Path, change: Callable[[Path], dict[str, Any]], reason: str) -> None:
    with gathering(model) as (port, found):
        joining = join_in_thread(options_of(model, 1, port, **change(model)))
        for each in (found, joining):
            with pytest.raises(StartError) as caught:
                each.result(20)
            assert reason in str(caught.value)
            assert "on node 0" in str(caught.value)


def altered(model: Path, name: str, old: bytes, new: bytes) -> dict[str, Any]:
    copy = model.parent / "copy"
    shutil.copytree(model, copy)
    content = (copy / name).read_bytes() if old else b""
    (copy / name).write_bytes(content.replace(old, new, 1) if old else new)
    return {"model_path": str(copy)}


def received(link: SecureSocket, count: int) -> bytes:
    data, buffer = b"", memoryview(bytearray(1 << 18))
    while len(data) < count and (size := link.recv_into(buffer)):
        data += bytes(buffer[:size])
    return data


@contextmanager
def opened(tamper: Callable[[bytes], list[bytes]]) -> Iterator[tuple[SecureSocket, SecureSocket]]:
    """Both ends of a connection; `tamper` gives what the second receives for each record of the first."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, ThreadPoolExecutor(1) as pool:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        accepted = pool.submit(open_secure, far, SECRET, accepted=True)
        link = open_secure(near, SECRET, accepted=False)
        send = near.sendall
        link._socket = Tampering(send, tamper)  # type: ignore[assignment]
        yield link, accepted.result(5)
        for sock in (near, far):
            sock.close()


class Tampering:
    def __init__(self, send: Callable[[bytes], None], tamper: Callable[[bytes], list[bytes]]) -> None:
        self._send, self._tamper = send, tamper

    def sendall(self, data: bytes) -> None:
        for each in self._tamper(data):
            self._send(each)


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda record: [record[:-1] + b"!"], "wrong HMAC"),
        (lambda record: [record, record], "wrong HMAC"),
        (lambda record: [b"\1" + record[1:]], "wrong HMAC"),
        (lambda record: [b"\xff\xff\xff\xff" + record[4:]], "no valid length"),
        (lambda record: [b"\0\0\0\0" + record[4:]], "no valid length"),
    ],
)
def test_a_connection_notices_changes(tamper: Callable[[bytes], list[bytes]], reason: str) -> None:
    with opened(tamper) as (near, far):
        near.sendall(b"one")
        near.sendall(b"two")
        with pytest.raises(ConnectionError, match=reason):
            received(far, 99)


def test_a_connection_that_ends_within_a_record_ends() -> None:
    with opened(lambda record: [record[:-1]]) as (near, far):
        near.sendall(b"one")
        near._socket._send.__self__.shutdown(socket.SHUT_WR)  # type: ignore[attr-defined]
        assert received(far, 99) == b""


def test_a_proof_is_worthless_elsewhere() -> None:
    """A stranger between two nodes, or one who sends back what it gets, does not get in."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, ThreadPoolExecutor(1) as pool, socket.create_connection(listener.getsockname()) as stranger:
        far, _ = listener.accept()
        accepted = pool.submit(open_secure, far, SECRET, accepted=True)
        greeting = stranger.recv(99)
        stranger.sendall(greeting)  # its own nonce, then its own proof
        stranger.sendall(bytes(32))
        with pytest.raises(WrongSecret):
            accepted.result(5)
        far.close()


def test_a_secret_has_16_bytes(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot read"):
        read_secret(str(tmp_path / "none"))
    (tmp_path / "short").write_bytes(b" 123456789012345\n")
    with pytest.raises(StartError, match="has 15 bytes, fewer than 16"):
        read_secret(str(tmp_path / "short"))
