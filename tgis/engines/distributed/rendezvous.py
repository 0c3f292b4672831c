"""How the ranks of other nodes find rank 0: they connect to MASTER_PORT and send what they are about to load.

Rank 0 waits for all of them, then closes its port. Either side may start first and waits for the other without end.
Nothing here keeps strangers out, which is up to the network. The digest of the secret tells two clusters apart.
"""

import hashlib
import hmac
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tgis.engines.distributed.facts import difference, facts_of
from tgis.errors import StartError, file_errors
from tgis.ipc.channel import encode_frame, receive_messages
from tgis.ipc.messages import EngineOptions, Fatal

log = logging.getLogger(__name__)

_HANDSHAKE_SECONDS = 2.0
_MAX_HANDSHAKE_BYTES = 1 << 20
_RETRY_SECONDS = 0.5
_POLL_SECONDS = 0.05


class Joining(msgspec.Struct, frozen=True):
    """The first message of a rank."""

    rank: int
    node: int
    secret_digest: bytes
    facts: dict[str, str]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The answer, once all ranks have joined: the HOST:PORT of torch's store."""

    store: str


Arrival = tuple[socket.socket, str, Joining]  # a rank's connection, its address and first message


def gather(options: EngineOptions) -> dict[int, socket.socket]:
    """Wait for the ranks of all other nodes. StartError, here and there, if a node differs from this one."""
    digest, facts = _secret_digest(options), facts_of(options)
    missing, links = set(range(options.ranks_per_node, options.num_shards)), dict[int, socket.socket]()
    with _listen(options.master_port) as listener:
        arrivals = _arrivals(listener, digest)
        while missing:
            log.info("waiting on port %d for rank %s", options.master_port, ", ".join(map(str, sorted(missing))))
            link, address, joining = next(arrivals)
            notice_cut_links(link, options.cluster_timeout_seconds)
            # A node has restarted, or two nodes have the same NODE_RANK.
            if previous := links.pop(joining.rank, None):
                _refuse(previous, f"rank {joining.rank} has joined a second time, from {address}")
            links[joining.rank] = link
            missing.discard(joining.rank)
            if differs := difference(joining.facts, joining.node, facts):
                for joined in links.values():
                    _refuse(joined, differs)
                raise StartError(differs)
            log.info("rank %d has joined, node %d at %s", joining.rank, joining.node, address)
    return links


def _secret_digest(options: EngineOptions) -> bytes:
    with file_errors("CLUSTER_SECRET_PATH"):
        return hashlib.sha256(Path(str(options.cluster_secret_path)).read_bytes().strip()).digest()


def _listen(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    with file_errors(f"MASTER_PORT: cannot listen on port {port}"):
        return socket.create_server(("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)


def _arrivals(listener: socket.socket, digest: bytes) -> Iterator[Arrival]:
    """The ranks of this cluster as they connect; a thread for each connection, so that silent ones delay no rank."""
    arrived = queue.SimpleQueue[Arrival]()
    listener.settimeout(_POLL_SECONDS)
    while True:
        with suppress(TimeoutError):
            threading.Thread(target=_handshake, args=(*listener.accept(), digest, arrived.put), daemon=True).start()
        while not arrived.empty():
            yield arrived.get()


def _handshake(sock: socket.socket, peer: Any, digest: bytes, arrive: Callable[[Arrival], None]) -> None:
    """Pass on a rank of this cluster; other connections are closed and logged."""
    try:
        sock.settimeout(_HANDSHAKE_SECONDS)
        joining = _receive(sock, Joining)
        if hmac.compare_digest(joining.secret_digest, digest):
            arrive((sock, address_of(peer), joining))
            return
        _refuse(sock, "CLUSTER_SECRET_PATH is another on node 0 than on this node")
        reason = "with another CLUSTER_SECRET_PATH"
    except (OSError, ValueError) as error:
        reason = f"but {error}"
    sock.close()
    log.warning("%s has connected, %s", address_of(peer), reason)


def _receive(sock: socket.socket, message_type: Any) -> Any:
    """The next message, or ConnectionError."""
    for message in receive_messages(sock, message_type, _MAX_HANDSHAKE_BYTES):
        return message
    raise ConnectionError("its connection was closed")


def _refuse(link: socket.socket, reason: str) -> None:
    with suppress(OSError):
        link.sendall(encode_frame(Fatal(reason)))
    link.close()


def join(options: EngineOptions) -> tuple[socket.socket, str]:
    """Connect to rank 0 and wait until all ranks have: the connection, and the HOST:PORT of torch's store.

    Obstacles are logged and tried again. StartError if rank 0 refuses this node.
    """
    joining = Joining(options.rank, options.node_rank, _secret_digest(options), facts_of(options))
    address, obstacle = (str(options.master_addr), options.master_port), ""
    while True:
        try:
            return _try_to_join(address, joining, options.cluster_timeout_seconds)
        except (OSError, ValueError) as error:
            if obstacle != (obstacle := getattr(error, "strerror", None) or str(error)):
                log.warning("node 0 at %s, port %d: %s; trying again", *address, obstacle)
        time.sleep(_RETRY_SECONDS)


def _try_to_join(address: tuple[str, int], joining: Joining, timeout: float) -> tuple[socket.socket, str]:
    with socket.create_connection(address, _HANDSHAKE_SECONDS) as sock:
        notice_cut_links(sock, timeout)
        sock.sendall(encode_frame(joining))
        answer = _receive(sock, Joined | Fatal)
        if isinstance(answer, Fatal):
            raise StartError(f"node 0 at {address[0]} refuses this node: {answer.message}")
        return sock.dup(), answer.store


def notice_cut_links(sock: socket.socket, seconds: float) -> None:
    """Have the kernel probe the peer every second, and break the connection if it does not answer for `seconds`.

    The kernel of the peer answers, however busy its process is: a library may hold the GIL for long while it loads.
    """
    options = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: max(int(seconds) - 1, 1)}
    options |= {socket.TCP_USER_TIMEOUT: int(seconds * 1000), socket.TCP_NODELAY: 1}
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, name, value)


def address_of(end: tuple[Any, ...]) -> str:
    """The address of an end of a connection; IPv4 as such, even if an IPv6 socket has accepted it."""
    return str(end[0]).removeprefix("::ffff:")
