"""How the ranks of other nodes find rank 0: they connect to it, prove the secret, and say what they would load.

Rank 0 waits for all of them, then closes its port. Either side may start first, and waits for the other without end.
"""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import msgspec

from tgis.engines.distributed import secure_socket
from tgis.engines.distributed.facts import difference, facts_of
from tgis.engines.distributed.secure_socket import SecureSocket, WrongSecret
from tgis.errors import StartError
from tgis.ipc.channel import encode_frame, receive_messages
from tgis.ipc.messages import EngineOptions, Fatal

log = logging.getLogger(__name__)

_MAX_HANDSHAKES = 64  # at a time
_RETRY_SECONDS = 0.5


class Joining(msgspec.Struct, frozen=True):
    """The first message of a rank."""

    rank: int
    node: int
    facts: dict[str, str]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The answer, once all ranks are there."""

    store: str  # where torch's ranks meet


def gather(options: EngineOptions) -> dict[int, SecureSocket]:
    """Wait for the ranks of all other nodes; StartError, for these as well, if one differs from this node."""
    secret, facts = secure_socket.read_secret(str(options.cluster_secret_path)), facts_of(options)
    missing, links = set(range(options.ranks_per_node, options.num_shards)), dict[int, SecureSocket]()
    arrivals = queue.SimpleQueue[tuple[SecureSocket, Joining]]()

    def welcome(sock: socket.socket) -> None:
        link = secure_socket.open_secure(sock, secret, accepted=True)
        joining = next(receive_messages(link, Joining))
        secure_socket.notice_cut_links(sock, options.cluster_timeout_seconds)
        arrivals.put((link, joining))

    listener = _listen(options.master_port)
    threading.Thread(target=_accept, args=(listener, welcome), daemon=True, name="accept").start()
    try:
        while missing:
            log.info("waiting on port %d for rank %s", options.master_port, ", ".join(map(str, sorted(missing))))
            link, joining = arrivals.get()
            if twin := links.pop(joining.rank, None):  # its node has started again, or has the number of another
                _refuse(twin, f"rank {joining.rank} has joined a second time, from {link.peer_address}")
            links[joining.rank] = link
            missing -= {joining.rank}
            if differs := difference(joining.facts, joining.node, facts):
                for each in links.values():
                    _refuse(each, differs)
                raise StartError(differs)
            log.info("rank %d has joined, node %d at %s", joining.rank, joining.node, link.peer_address)
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()
    return links


def _listen(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise StartError(f"MASTER_PORT: cannot listen on port {port}: {error.strerror}") from error


def _accept(listener: socket.socket, welcome: Callable[[socket.socket], None]) -> None:
    """Welcome whoever connects in a thread, but only some at a time, until the listener is shut down."""
    places = threading.Semaphore(_MAX_HANDSHAKES)

    def attempt(sock: socket.socket, address: str) -> None:
        try:
            welcome(sock)
        except (OSError, StopIteration, msgspec.MsgspecError) as error:
            log.warning("%s has connected, but %s", secure_socket.unmapped(address), error)
            sock.close()
        finally:
            places.release()

    with suppress(OSError):
        while places.acquire():
            sock, (address, *_) = listener.accept()
            threading.Thread(target=attempt, args=(sock, address), daemon=True, name="handshake").start()


def _refuse(link: SecureSocket, reason: str) -> None:
    with suppress(OSError):
        link.sendall(encode_frame(Fatal(reason)))
    link.close()


def join(options: EngineOptions) -> tuple[SecureSocket, str]:
    """Connect to rank 0, and wait until all ranks have. StartError if it does not take this node."""
    secret, facts = secure_socket.read_secret(str(options.cluster_secret_path)), facts_of(options)
    link = _connect(options, secret)
    link.sendall(encode_frame(Joining(options.rank, options.node_rank, facts)))
    try:
        answer = next(receive_messages(link, Joined | Fatal), None)
    except OSError:
        answer = None
    match answer:
        case Joined(store):
            return link, store
        case Fatal(reason):
            link.close()
            raise StartError(reason)
    link.close()
    raise StartError(f"node 0 at {options.master_addr} has ended before all ranks were there")


def _connect(options: EngineOptions, secret: bytes) -> SecureSocket:
    """Try until node 0 is there, and what speaks as it does; each other obstacle is a line in the log."""
    obstacle = ""
    while True:
        try:
            return _attempt(options, secret)
        except OSError as error:
            if obstacle != (obstacle := error.strerror or str(error)):
                log.warning(
                    "node 0 at %s, port %d: %s; trying again", options.master_addr, options.master_port, obstacle
                )
        time.sleep(_RETRY_SECONDS)


def _attempt(options: EngineOptions, secret: bytes) -> SecureSocket:
    address = str(options.master_addr), options.master_port
    with ExitStack() as stack:
        sock = stack.enter_context(socket.create_connection(address, secure_socket.HANDSHAKE_SECONDS))
        try:
            link = secure_socket.open_secure(sock, secret, accepted=False)
        except WrongSecret:
            raise StartError(f"CLUSTER_SECRET_PATH is another on node 0 at {address[0]} than on this node") from None
        secure_socket.notice_cut_links(sock, options.cluster_timeout_seconds)
        stack.pop_all()
        return link
