"""tgis.ipc.framing: messages survive any split of the byte stream."""

import itertools
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgis.ipc.framing import MAX_FRAME_BYTES, FrameReader, encode_frame, receive_messages
from tgis.ipc.messages import Cancel, Fatal, Shutdown

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


def test_a_message_arrives_with_its_last_byte() -> None:
    frame, reader = encode_frame(Fatal("out of memory")), FrameReader(Message)
    assert reader.feed(frame[:-1]) == []
    assert reader.feed(frame[-1:]) == [Fatal("out of memory")]


def test_a_corrupt_length_is_not_waited_for() -> None:
    with pytest.raises(AssertionError):
        FrameReader(Message).feed(struct.pack("<I", MAX_FRAME_BYTES + 1))


def test_messages_of_a_socket_keep_nothing_of_what_is_read_into_next() -> None:
    sent = [Fatal(letter * size) for letter, size in (("a", 10), ("b", 1 << 20), ("c", 0), ("d", 10))]
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs:
            theirs.sendall(b"".join(map(encode_frame, sent)))

    with ours, ThreadPoolExecutor() as pool:
        pool.submit(send)
        assert list(receive_messages(ours, Message)) == sent
