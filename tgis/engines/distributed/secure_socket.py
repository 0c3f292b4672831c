"""A TCP connection between nodes, each of which has proven to the other that it knows the cluster's secret.

Nothing is encrypted. Every record carries an HMAC over its number and its bytes, with keys of this connection: nobody
without the secret can begin a connection, or change, repeat or leave out anything in it.
"""

import hmac
import os
import socket
import struct
import time
from pathlib import Path

from tgis.errors import StartError

HANDSHAKE_SECONDS = 5.0
_MAGIC = b"tgis-1\r\n"  # and the version of this protocol
_NONCE_BYTES = 32
_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 16, 4096
_HEAD = struct.Struct("<I16s")  # length and HMAC of a record
_MAX_RECORD_BYTES = 1 << 16
_REFUSAL = bytes(32)  # instead of a proof


class WrongSecret(ConnectionError):
    """The other side has another secret, or none."""


class SecureSocket:
    """The part of a socket that `Channel` needs."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._socket = sock
        self._input = sock.makefile("rb")
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0
        self.local_address, self.peer_address = (unmapped(end[0]) for end in (sock.getsockname(), sock.getpeername()))

    def sendall(self, data: bytes) -> None:
        """Send all of it; one thread at a time."""
        for start in range(0, len(data), _MAX_RECORD_BYTES):
            part = data[start : start + _MAX_RECORD_BYTES]
            self._socket.sendall(_HEAD.pack(len(part), _tag(self._send_key, self._num_sent, part)) + part)
            self._num_sent += 1

    def recv_into(self, buffer: memoryview) -> int:
        """Wait for a record, and return its length; 0 at the end. ConnectionError for what the peer has not sent."""
        head = self._input.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return 0
        length: int
        length, tag = _HEAD.unpack(head)
        if not 0 < length <= _MAX_RECORD_BYTES:
            raise ConnectionError("a record has no valid length")
        part = self._input.read(length)
        if len(part) < length:
            return 0
        if not hmac.compare_digest(tag, _tag(self._receive_key, self._num_received, part)):
            raise ConnectionError("a record has a wrong HMAC")
        self._num_received += 1
        buffer[:length] = part
        return length

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._input.close()
        self._socket.close()


def open_secure(sock: socket.socket, secret: bytes, *, accepted: bool) -> SecureSocket:
    """Prove the secret to each other: first the side that has connected. OSError if the peer says something else, or
    too little within HANDSHAKE_SECONDS; WrongSecret if its proof is wrong.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    nonce = os.urandom(_NONCE_BYTES)
    sock.sendall(_MAGIC + nonce)
    greeting = _read(sock, len(_MAGIC) + _NONCE_BYTES, deadline)
    if not greeting.startswith(_MAGIC):
        raise ConnectionError("it is no node of a cluster")
    theirs = greeting[len(_MAGIC) :]
    nonces = nonce + theirs if accepted else theirs + nonce
    own, peer = (b"accepted", b"connected") if accepted else (b"connected", b"accepted")

    def derive(label: bytes) -> bytes:
        return hmac.digest(secret, label + nonces, "sha256")

    if not accepted:
        sock.sendall(derive(b"proof of " + own))
    if not hmac.compare_digest(_read(sock, len(_REFUSAL), deadline), derive(b"proof of " + peer)):
        if accepted:
            sock.sendall(_REFUSAL)
        raise WrongSecret("its CLUSTER_SECRET_PATH is another")
    if accepted:
        sock.sendall(derive(b"proof of " + own))
    return SecureSocket(sock, derive(b"records of " + own), derive(b"records of " + peer))


def read_secret(path: str) -> bytes:
    """The secret in a file, without white space at its ends; StartError if there is none, or a short one."""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(_MAX_SECRET_BYTES).strip()
    except OSError as error:
        raise StartError(f"CLUSTER_SECRET_PATH: cannot read {path}: {error.strerror}") from error
    if len(secret) < _MIN_SECRET_BYTES:
        raise StartError(f"CLUSTER_SECRET_PATH: {path} has {len(secret)} bytes, fewer than {_MIN_SECRET_BYTES}")
    return secret


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


def _tag(key: bytes, number: int, data: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "little") + data, "sha256")[:16]


def _read(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data


def unmapped(address: str) -> str:
    """An IPv4 address as it is written, also where a socket of IPv6 has accepted the connection."""
    return address.removeprefix("::ffff:")
