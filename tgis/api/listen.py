"""Listening sockets, with one line for what can go wrong."""

import socket

from tgis.errors import StartError


def listen(protocol: str, host: str, port: int) -> socket.socket:
    """A socket that listens at an IP address; StartError if the port is taken."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # without the address
        raise StartError(f"cannot listen for {protocol} on {host}:{port}: {reason}") from error
