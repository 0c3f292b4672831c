"""The socket between two processes: messages survive any split of the byte stream, and a child that cannot read them
ends instead of hanging.
"""

import itertools
import queue
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgis.ipc import channel as channel_module
from tgis.ipc.channel import Channel, FrameReader, encode_frame, receive_messages
from tgis.ipc.messages import Cancel, Fatal, FromEngine, GetBatchState, Heartbeat, Shutdown, ToEngine

Message = Cancel | Fatal | Shutdown
messages = st.one_of(
    st.builds(Cancel, st.lists(st.integers(0, 2**63), max_size=5)), st.builds(Fatal, st.text()), st.just(Shutdown())
)


@given(st.lists(messages, max_size=6), st.data())
def test_a_split_stream_gives_the_messages_that_were_sent(sent: list[Message], data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = FrameReader(Message)
    pieces = [stream[start:end] for start, end in itertools.pairwise([0, *cuts, len(stream)])]
    assert [message for piece in pieces for message in reader.feed(piece)] == sent


def test_messages_of_a_socket_keep_nothing_of_what_is_read_into_next() -> None:
    sent = [Fatal(letter * size) for letter, size in (("a", 10), ("b", 1 << 20), ("c", 0), ("d", 10))]
    ours, theirs = socket.socketpair()
    with ours, ThreadPoolExecutor() as pool:
        pool.submit(theirs.sendall, b"".join(map(encode_frame, sent))).add_done_callback(lambda _: theirs.close())
        assert list(receive_messages(ours, Message)) == sent


def test_the_end_of_the_parent_is_reported() -> None:
    ours, theirs = socket.socketpair()
    ended = queue.SimpleQueue[str]()
    channel = Channel(theirs, ToEngine, ended.put)
    ours.close()
    assert ended.get(timeout=10) == "its connection was closed"
    channel.send(Heartbeat(0))
    assert ended.get(timeout=10) == "Broken pipe"
    theirs.close()


def test_a_frame_that_is_too_large_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    ended = queue.SimpleQueue[str]()
    with ours, theirs:
        Channel(theirs, ToEngine, ended.put)
        ours.sendall(b"\1\0\0\x40")
        assert ended.get(timeout=10) == "a frame of 1073741825 bytes, at most 1073741824 are allowed"


def test_heartbeats_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_HEARTBEAT_SECONDS", 0.001)
    ours, theirs = socket.socketpair()
    beats = queue.SimpleQueue[Heartbeat]()  # its thread waits for more
    for number in range(3):
        beats.put(Heartbeat(3, number))
    Channel(theirs, ToEngine, lambda _reason: None).start_heartbeat(beats.get)
    with ours:
        received = itertools.islice(receive_messages(ours, FromEngine), 3)
        assert [*received] == [Heartbeat(3, number) for number in range(3)]


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


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (GetBatchState(), 'a message could not be handled: RuntimeError("can\'t start new thread")'),
        (Fatal("no message of this direction"), "a message could not be handled: ValidationError("),
        (None, None),
    ],
)
def test_a_message_that_cannot_be_handled_or_read_ends_the_process(sent: ToEngine | Fatal | None, reason: Any) -> None:
    """So does the end of the parent, without an error."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command, fds = [sys.executable, "-c", CHILD, str(theirs.fileno())], (theirs.fileno(),)
            child = subprocess.Popen(command, pass_fds=fds, stderr=subprocess.PIPE, text=True)
        ours.settimeout(60)
        reader = FrameReader(FromEngine)
        assert reader.feed(ours.recv(1 << 16)) == [Heartbeat(0, 0)]
        if sent is None:
            ours.shutdown(socket.SHUT_RDWR)
            assert (child.communicate(timeout=60)[1], child.returncode) == ("", 0)
            return
        ours.sendall(encode_frame(sent))
        (said,) = reader.feed(b"".join(iter(lambda: ours.recv(1 << 16), b"")))
        assert said.message.startswith(reason)
        assert child.communicate(timeout=60)[1].startswith("the channel cannot be read\nTraceback")
        assert child.returncode == 1
