"""Channels: typed frames through a ring, and the sequence of calls."""

import os
from collections.abc import Iterator

import msgspec
import pytest

from phalanx.shm.channel import CallSequence, Receiver, Sender
from phalanx.shm.codec import Frame, FrameHeader, FrameKind
from phalanx.shm.errors import ProtocolError, QueueClosedError, QueueEmptyError
from phalanx.shm.ring_buffer import RingReader, RingWriter, create_ring
from phalanx.shm.segment import SharedSegment


class Ping(msgspec.Struct, frozen=True):
    number: int


@pytest.fixture
def ends() -> Iterator[tuple[Sender, Receiver[Ping]]]:
    segment = create_ring("test", capacity=1024, num_readers=1)
    receiver = Receiver[Ping](
        RingReader(SharedSegment.attach(os.dup(segment.fd), segment.size), 0), {FrameKind.REQUEST: Ping}
    )
    sender = Sender(RingWriter(segment), epoch=3, rank=2)
    yield sender, receiver
    sender.close()
    receiver.close()


def test_a_frame_says_who_sent_it(ends: tuple[Sender, Receiver[Ping]]) -> None:
    sender, receiver = ends
    sender.send(FrameKind.REQUEST, 7, Ping(1), [b"raw"])

    with receiver.receive() as frame:
        assert (frame.epoch, frame.call_id, frame.rank, frame.kind) == (3, 7, 2, FrameKind.REQUEST)
        assert frame.message == Ping(1)
        assert bytes(frame.buffers[0]) == b"raw"
    with pytest.raises(QueueEmptyError), receiver.receive():
        pass


def test_a_buffer_does_not_outlive_its_frame(ends: tuple[Sender, Receiver[Ping]]) -> None:
    sender, receiver = ends
    sender.send(FrameKind.REQUEST, 1, Ping(1), [b"raw"])
    with receiver.receive() as frame:
        pass

    with pytest.raises(ValueError, match="released"):
        bytes(frame.buffers[0])


def test_a_frame_that_does_not_decode_is_consumed(ends: tuple[Sender, Receiver[Ping]]) -> None:
    sender, receiver = ends
    sender.send(FrameKind.REQUEST, 1, {"number": "one"})
    sender.send(FrameKind.REQUEST, 2, Ping(2))
    with pytest.raises(ProtocolError), receiver.receive():
        pass

    with receiver.receive() as frame:
        assert frame.message == Ping(2)


def test_a_frame_that_is_taken_leaves_its_buffers_behind(ends: tuple[Sender, Receiver[Ping]]) -> None:
    sender, receiver = ends
    sender.send(FrameKind.REQUEST, 7, Ping(1), [b"raw"])
    sender.send(FrameKind.REQUEST, 8, Ping(2))

    assert receiver.take() == Frame(3, 7, 2, FrameKind.REQUEST, Ping(1), ())
    assert receiver.take() == Frame(3, 8, 2, FrameKind.REQUEST, Ping(2), ())
    assert receiver.ring.stats().used_bytes == 0
    with pytest.raises(QueueEmptyError):
        receiver.take()


def test_a_frame_that_does_not_decode_is_taken_all_the_same(ends: tuple[Sender, Receiver[Ping]]) -> None:
    sender, receiver = ends
    sender.send(FrameKind.REQUEST, 1, {"number": "one"})
    sender.send(FrameKind.REQUEST, 2, Ping(2))
    with pytest.raises(ProtocolError):
        receiver.take()

    assert receiver.take().message == Ping(2)


def test_a_closed_sender_is_seen(ends: tuple[Sender, Receiver[Ping]]) -> None:
    sender, receiver = ends
    sender.close()

    with pytest.raises(QueueClosedError), receiver.receive():
        pass


def test_calls_come_in_sequence() -> None:
    sequence = CallSequence(epoch=1)
    for call_id in (1, 2, 3):
        sequence.accept(FrameHeader(epoch=1, call_id=call_id, rank=-1, kind=FrameKind.REQUEST))


@pytest.mark.parametrize(
    ("epoch", "call_id", "kind"),
    [
        (1, 2, FrameKind.REQUEST),
        (1, 0, FrameKind.REQUEST),
        (2, 1, FrameKind.REQUEST),
        (1, 1, FrameKind.REPLY),
    ],
)
def test_a_call_out_of_sequence_is_a_protocol_error(epoch: int, call_id: int, kind: FrameKind) -> None:
    with pytest.raises(ProtocolError):
        CallSequence(epoch=1).accept(FrameHeader(epoch=epoch, call_id=call_id, rank=-1, kind=kind))
