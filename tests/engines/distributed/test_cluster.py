"""Ranks on several machines: how nodes find and compare each other."""

import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
from batches import engine_options
from cluster import free_port
from engine_clients import INFO
from harness import wait_until
from tiny_models import tgis_warnings
from transformers import LlamaConfig

from tgis.engines.distributed import follower, ranks
from tgis.engines.distributed.rendezvous import Joined, Joining, gather, join, notice_cut_links
from tgis.errors import StartError
from tgis.ipc.channel import encode_frame, receive_messages
from tgis.ipc.lookups import AdapterStoreOptions
from tgis.ipc.messages import EngineOptions, Fatal, Ready

SECRET = b"16 bytes at least"
# Options that nodes need not have in common.
LOCAL = {"cache_dir": "", "num_threads": 7, "strict": True, "log_level": "debug", "cluster_interface": "lo"}


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
def gathering(model: Path, **changes: Any) -> Iterator[tuple[int, Future[dict[int, socket.socket]]]]:
    """A port on which rank 0 waits for rank 1, and the future of their connections."""
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(gather, options_of(model, 0, port, **changes))
        try:
            yield port, gathered
        finally:
            if not gathered.done():
                join_in_thread(options_of(model, 1, port, max_sequence_length=3)).exception(20)


def join_in_thread(options: EngineOptions) -> Future[tuple[socket.socket, str]]:
    return ThreadPoolExecutor(1).submit(join, options)


def test_ranks_join_in_spite_of_strangers_and_wrong_secrets(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").write_bytes(b"another")
    caplog.set_level("INFO")
    with gathering(model) as (port, gathered):
        with pytest.raises(StartError, match="CLUSTER_SECRET_PATH is another on node 0"):
            join(options_of(model, 1, port, cluster_secret_path=str(tmp_path / "other")))
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(15)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)
        joining_message = encode_frame(Joining(1, 1, b"", {"X": "X"}))
        strangers[1].sendall(joining_message.replace(b"\xa1X", b"\xa1\xff"))  # no UTF-8
        strangers[2].close()
        (tmp_path / "other").write_bytes(SECRET)  # without the new line
        joining = join_in_thread(options_of(model, 1, port, cluster_secret_path=str(tmp_path / "other"), **LOCAL))
        links = gathered.result(20)
        assert [*links] == [1]
        links[1].sendall(encode_frame(Joined("a:1")))
        link, store = joining.result(20)
        assert (store, link.getpeername()) == ("a:1", ("127.0.0.1", port))
        assert all(end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for end in (link, links[1]))
        with pytest.raises(ConnectionRefusedError):  # the port is closed again
            socket.create_connection(("127.0.0.1", port))
        assert "timed out" not in caplog.text  # nobody has waited for the silent one
        said = f"waiting on port {port} for rank 1", "rank 1 has joined, node 1 at 127.0.0.1"
        assert {*said} <= {*caplog.messages}
        for reason in (
            "with another CLUSTER_SECRET_PATH",
            "but a frame of 542393671 bytes",
            "but 'utf-8' codec",
            "but timed out",
        ):
            text = f"127.0.0.1 has connected, {reason}"
            wait_until(lambda text=text: text in "\n".join(tgis_warnings(caplog)), reason)  # type: ignore[misc]
        for sock in (*strangers, link, links[1]):
            sock.close()


def test_a_link_that_is_cut_is_noticed_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        notice_cut_links(link, 7.5)
        names = "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT", "TCP_NODELAY"
        values = [link.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
        assert values == [1, 1, 6, 7500, 1]
        assert (link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), link.gettimeout()) == (1, None)


def test_nodes_that_restart_join_again(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as node_0:
        port = node_0.getsockname()[1]
        with pytest.raises(StartError, match=f"^MASTER_PORT: cannot listen on port {port}: Address already in use"):
            gather(options_of(model, 0, port))
        with pytest.raises(StartError, match=r"^CLUSTER_SECRET_PATH: .*No such file or directory"):
            join(options_of(model, 1, port, cluster_secret_path="/nowhere"))
        twins = [join_in_thread(options_of(model, 1, port, num_shards=4, rank=2)) for _ in range(2)]
        for _ in twins:
            link, _ = node_0.accept()
            link.recv(1 << 16)  # or closing resets the connection
            link.close()
    refused = f"node 0 at 127.0.0.1, port {port}: Connection refused; trying again"
    wait_until(lambda: refused in caplog.messages, refused)
    caplog.set_level("INFO")
    gathered = ThreadPoolExecutor(1).submit(gather, options_of(model, 0, port, num_shards=4))
    ended, waiting = wait(twins, 20, FIRST_COMPLETED)
    with pytest.raises(StartError, match="rank 2 has joined a second time, from 127"):
        ended.pop().result()
    waiting.add(join_in_thread(options_of(model, 1, port, num_shards=4, rank=3)))
    links = gathered.result(20)
    assert links.keys() == {2, 3}
    closed = f"node 0 at 127.0.0.1, port {port}: its connection was closed; trying again"
    waiting_for = f"waiting on port {port} for rank 2, 3"
    assert {closed, waiting_for, "rank 2 has joined, node 1 at 127.0.0.1"} <= {*caplog.messages}
    for link in links.values():
        link.sendall(encode_frame(Joined("a:1")))
    for link in (*links.values(), *(future.result(20)[0] for future in waiting)):
        link.close()


def test_a_rank_of_another_node_ends_with_rank_0_and_rank_0_with_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, followed, aborts = mock.Mock(), mock.Mock(), SimpleQueue[str]()
    parent.abort = aborts.put
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
        rank_0, _ = listener.accept()
    monkeypatch.setattr(follower, "join", lambda _options: (link, "a:1"))
    monkeypatch.setattr(follower, "_follow", followed)
    monkeypatch.setattr(ranks, "use_interface", interface := mock.Mock())
    follower.follow_node_0(parent, options := options_of(model, 1, 1, cluster_interface="eth1"))
    ((_, *given, fail, on_ready),) = (call.args for call in followed.call_args_list)
    assert (given, interface.call_args.args) == ([options, "a:1"], ("eth1", "127.0.0.2"))
    on_ready(INFO)
    parent.send.assert_called_once_with(Ready(INFO))
    fail("failed: why")
    assert next(receive_messages(rank_0, Fatal)) == Fatal("failed: why")
    rank_0.sendall(encode_frame(Fatal("no memory")))
    rank_0.close()
    ends = [aborts.get(timeout=20) for _ in range(3)]
    gone = "rank 0 of the engine on node 0 at 127.0.0.1 is gone: its connection was closed"
    assert ends == ["rank 1 of the engine failed: why", "no memory", gone]
    link.close()


NEW_FILES = "tokenizer.json", "tokenizer_config.json", "quantize_config.json", "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: {"max_sequence_length": 7}, "max_sequence_length is 7 on node 1, 256 on node 0"),
        (lambda _: {"adapter_store": AdapterStoreOptions("/nowhere", 1, 1)}, "adapters is True on node 1, False on "),
        (lambda model: {"dtype": "float16"}, "dtype is float16 on node 1, float32 on node 0"),
        (lambda model: altered(model, "config.json", b"}", b" }"), "config.json is "),
        (lambda model: altered(model, "model.safetensors", b"{}", b"{ }"), "model.safetensors is 20 bytes on node 1, "),
        (lambda model: altered(model, "model.gguf", b"", b"GGUF"), "model.gguf is 4 bytes on node 1, missing"),
        *(
            (lambda model, name=name: altered(model, name, b"", b"{}"), f"{name} is 44136fa355b3678a")
            for name in NEW_FILES
        ),
    ],
)
def test_nodes_that_differ_end_both(model: Path, change: Callable[[Path], dict[str, Any]], reason: str) -> None:
    with gathering(model, num_shards=4) as (port, gathered):
        joining = join_in_thread(options_of(model, 1, port, num_shards=4, rank=2, **change(model)))
        for future in (gathered, joining):
            with pytest.raises(StartError) as caught:
                future.result(20)
            assert reason in str(caught.value)
            assert "on node 0" in str(caught.value)


def altered(model: Path, name: str, old: bytes, new: bytes) -> dict[str, Any]:
    copy = model.parent / "copy"
    shutil.copytree(model, copy)
    content = (copy / name).read_bytes() if old else b""
    (copy / name).write_bytes(content.replace(old, new, 1) if old else new)
    return {"model_path": str(copy)}
