"""A child process's end of the socket: it ends when it cannot read messages, instead of hanging."""

import socket
import subprocess
import sys

from tgis.ipc.framing import FrameReader, encode_frame
from tgis.ipc.messages import Fatal, FromEngine, GetBatchState, Heartbeat

CHILD = """
import socket, sys, threading
from tgis.ipc.channel import Channel
from tgis.ipc.messages import GetBatchState, Heartbeat, ToEngine

def handle(_message):
    raise RuntimeError("can't start new thread")

channel = Channel(socket.socket(fileno=int(sys.argv[1])), ToEngine)
channel.handle_inline(GetBatchState, handle)
channel.send(Heartbeat(0, 0))  # nothing is sent to it before
threading.Event().wait()
"""


def ended_by(sent: bytes) -> tuple[int, list[object]]:
    """The exit code of such a process, and what it says."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = subprocess.Popen([sys.executable, "-c", CHILD, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
        ours.settimeout(60)
        try:
            reader = FrameReader(FromEngine)
            assert list(reader.feed(ours.recv(1 << 16))) == [Heartbeat(0, 0)]
            ours.sendall(sent)
            said = b"".join(iter(lambda: ours.recv(1 << 16), b""))
            return child.wait(60), list(reader.feed(said))
        finally:
            child.kill()
            child.wait()


def test_a_message_that_cannot_be_handled_ends_the_process() -> None:
    code, said = ended_by(encode_frame(GetBatchState()))
    assert code == 1
    assert said == [Fatal('a message could not be handled: RuntimeError("can\'t start new thread")')]


def test_bytes_that_are_no_message_end_the_process() -> None:
    code, (said,) = ended_by(encode_frame(Fatal("no message of this direction")))
    assert code == 1
    assert isinstance(said, Fatal)
