"""Frames above the ring's limit: in order, all of them, bounded, and no wait that outlives its peer."""

import hashlib
import math
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
import zmq

from phalanx.shm import oversize
from phalanx.shm.channel import Receiver, Sender
from phalanx.shm.codec import FrameKind
from phalanx.shm.errors import (
    MessageTooLargeError,
    ProtocolError,
    QueueClosedError,
    QueueEmptyError,
    QueueTimeoutError,
    RingFullError,
    TransportError,
)
from phalanx.shm.oversize import OversizeLimits, Ticket
from phalanx.shm.process import ChildProcess, ChildSpec, Note, Spawner, wait_all_ready
from phalanx.shm.ring_buffer import RingReader, RingWriter, create_ring, max_record_bytes
from phalanx.shm.segment import SharedSegment
from support.children import wait_until
from support.ring_peers import PeerArgs

CAPACITY = 4096
LIMIT = max_record_bytes(CAPACITY)
LARGE = b"L" * 10_000


class MakeChannel(Protocol):
    def __call__(
        self, num_readers: int = 1, *, limits: OversizeLimits | None = ..., is_writer_alive: Any = ...
    ) -> tuple[Sender, list[Receiver[int]]]: ...


@pytest.fixture
def make_channel() -> Iterator[MakeChannel]:
    with ExitStack() as resources:

        def make(
            num_readers: int = 1,
            *,
            limits: OversizeLimits | None = OversizeLimits(),  # noqa: B008 (a value)
            is_writer_alive: Any = lambda: True,
        ) -> tuple[Sender, list[Receiver[int]]]:
            segment = create_ring("test", capacity=CAPACITY, num_readers=num_readers)
            receivers = []
            for index in range(num_readers):
                own = SharedSegment.attach(os.dup(segment.fd), segment.size)
                ring = RingReader(own, index, is_peer_alive=is_writer_alive)
                receivers.append(Receiver[int](ring, {FrameKind.REQUEST: int}))
                resources.callback(receivers[-1].close)
            sender = Sender(RingWriter(segment), epoch=0, rank=-1, oversize=limits)
            # Before the receivers, which would otherwise be waited for.
            resources.callback(sender.close)
            for receiver in receivers:
                resources.callback(receiver.close)
            return sender, receivers

        yield make


def send(sender: Sender, number: int, payload: bytes, deadline_at: float | None = None) -> None:
    sender.send(FrameKind.REQUEST, number, number, [payload], deadline_at=deadline_at)


def receive(receiver: Receiver[int], deadline_at: float | None = None) -> tuple[int, bytes]:
    with receiver.receive(deadline_at=deadline_at) as frame:
        return frame.message, bytes(frame.buffers[0])


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def payload_of_frame(num_bytes: int) -> bytes:
    """Return the payload of a frame of exactly `num_bytes`: header 20, body 1, aligned to 24, length 8."""
    return bytes(num_bytes - 32)


# The limit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("excess", "num_tickets"), [(-1, 0), (0, 0), (1, 1)])
def test_a_frame_takes_the_ring_up_to_its_limit(
    make_channel: MakeChannel, excess: int, num_tickets: int
) -> None:
    sender, (receiver,) = make_channel()
    payload = payload_of_frame(LIMIT + excess)
    send(sender, 1, payload)

    assert receive(receiver) == (1, payload)
    assert sender._oversize is not None
    assert sender._oversize.num_sent == num_tickets
    # Not a byte more than assumed above.
    assert receiver.ring.stats().num_bytes == (
        LIMIT + excess if not num_tickets else receiver.ring.stats().num_bytes
    )


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_a_payload_may_be_as_large_as_all_that_may_be_unread(make_channel: MakeChannel, excess: int) -> None:
    sender, (receiver,) = make_channel(limits=OversizeLimits(max_unread_bytes=50_000))
    payload = payload_of_frame(50_000 + excess)
    if excess > 0:
        with pytest.raises(MessageTooLargeError) as caught:
            send(sender, 1, payload)
        assert (caught.value.num_bytes, caught.value.max_bytes) == (50_001, 50_000)
        return
    send(sender, 1, payload)

    assert receive(receiver) == (1, payload)


def test_a_large_frame_is_taken_as_a_small_one(make_channel: MakeChannel) -> None:
    sender, (receiver,) = make_channel()
    send(sender, 1, LARGE)
    sender.send(FrameKind.REQUEST, 2, 2)

    frames = [receiver.take(deadline_at=soon()) for _ in range(2)]
    assert [(frame.call_id, frame.message, frame.buffers) for frame in frames] == [(1, 1, ()), (2, 2, ())]


def test_without_limits_for_it_a_large_frame_is_an_error(make_channel: MakeChannel) -> None:
    sender, _ = make_channel(limits=None)

    with pytest.raises(MessageTooLargeError):
        send(sender, 1, LARGE)


def test_nothing_is_made_before_the_first_large_frame(make_channel: MakeChannel) -> None:
    sender, (receiver,) = make_channel()
    before = os.listdir("/proc/self/fd")
    send(sender, 1, b"small")
    receive(receiver)
    assert os.listdir("/proc/self/fd") == before

    send(sender, 2, LARGE)
    assert receive(receiver) == (2, LARGE)
    assert os.listdir("/proc/self/fd") != before


def test_the_sockets_stand_where_the_caller_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")
    segment = create_ring("test", capacity=CAPACITY, num_readers=1)
    reader = RingReader(SharedSegment.attach(os.dup(segment.fd), segment.size), 0)
    receiver = Receiver[int](reader, {FrameKind.REQUEST: int})
    sender = Sender(RingWriter(segment), epoch=0, rank=0, oversize=OversizeLimits(), folder=Path(folder))
    send(sender, 1, LARGE)
    assert receive(receiver) == (1, LARGE)

    assert [path.name for path in folder.iterdir()] == ["oversize-0"]
    sender.close()
    receiver.close()


# Order and bounds -----------------------------------------------------------------------------------------------


def test_large_and_small_frames_keep_their_order(make_channel: MakeChannel) -> None:
    sender, receivers = make_channel(3)
    payloads = [LARGE if number % 3 == 0 else bytes([number]) for number in range(12)]
    for number, payload in enumerate(payloads):
        send(sender, number, payload)

    for receiver in receivers:
        assert [receive(receiver) for _ in payloads] == list(enumerate(payloads))


@pytest.mark.parametrize(
    "limits", [OversizeLimits(max_unread_tickets=3), OversizeLimits(max_unread_bytes=3 * 10_100)]
)
def test_the_slowest_reader_bounds_what_is_unread(make_channel: MakeChannel, limits: OversizeLimits) -> None:
    sender, (fast, slow) = make_channel(2, limits=limits)
    for number in range(3):
        send(sender, number, LARGE)
        receive(fast)

    with pytest.raises(RingFullError, match="reader 1"):
        send(sender, 3, LARGE)
    began_at = time.monotonic()
    with pytest.raises(QueueTimeoutError, match="reader 1"):
        send(sender, 3, LARGE, began_at + 0.05)
    assert 0.05 <= time.monotonic() - began_at < 5
    assert receive(slow) == (0, LARGE)
    send(sender, 3, LARGE)
    assert receive(fast) == (3, LARGE)
    assert [receive(slow)[0] for _ in range(3)] == [1, 2, 3]


def test_more_is_sent_than_the_ring_has_room_for_tickets(make_channel: MakeChannel) -> None:
    sender, (receiver,) = make_channel(limits=OversizeLimits(max_unread_tickets=4096))
    num_frames = 200
    got: list[int] = []

    def receive_all() -> None:
        for _ in range(num_frames):
            got.append(receive(receiver, soon())[0])

    num_sent = 0
    with suppress(RingFullError):
        while True:
            send(sender, num_sent, LARGE)
            num_sent += 1
    thread = threading.Thread(target=receive_all)
    thread.start()
    for number in range(num_sent, num_frames):
        send(sender, number, LARGE, soon())
    thread.join()

    assert num_sent < num_frames
    assert got == list(range(num_frames))


@pytest.mark.full
def test_two_hundred_megabytes_arrive(make_channel: MakeChannel) -> None:
    sender, (receiver,) = make_channel()
    payload = random.Random(0).randbytes(1 << 20) * 200
    send(sender, 1, payload)

    with receiver.receive(deadline_at=soon(60)) as frame:
        assert hashlib.sha256(frame.buffers[0]).digest() == hashlib.sha256(payload).digest()


# Failures -------------------------------------------------------------------------------------------------------


def test_a_frame_whose_payload_is_late_comes_again(make_channel: MakeChannel) -> None:
    sender, (receiver,) = make_channel()
    assert sender._oversize is not None
    ticket = sender._oversize.wait_room(10, None)
    _write_ticket(sender, ticket)
    with pytest.raises(QueueTimeoutError):
        receive(receiver, soon(0.02))
    with pytest.raises(QueueTimeoutError):
        receive(receiver, soon(0.02))

    pieces = sender._encoder.encode(FrameKind.REQUEST, 0, 7, [b"late"])
    _push(sender, ticket.serial, b"".join(pieces)[:10].ljust(10))
    with pytest.raises(ProtocolError, match="does not decode"):
        receive(receiver, soon())
    send(sender, 8, LARGE)
    assert receive(receiver, soon()) == (8, LARGE)


def test_who_does_not_want_to_wait_waits_only_for_what_is_on_its_way(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, (receiver,) = make_channel()
    assert sender._oversize is not None
    monkeypatch.setattr(oversize, "_ON_ITS_WAY_S", 0.05)
    _write_ticket(sender, sender._oversize.wait_room(10, None))

    with pytest.raises(QueueEmptyError, match="payload 1"):
        receive(receiver)


def test_a_payload_whose_ticket_was_never_published_is_passed_over(make_channel: MakeChannel) -> None:
    sender, receivers = make_channel(2)
    send(sender, 1, LARGE)
    assert [receive(receiver) for receiver in receivers] == [(1, LARGE)] * 2
    assert sender._oversize is not None
    sockets = sender._oversize._sockets
    good, sockets[1] = sockets[1], FullSocket()  # type: ignore[assignment]
    with pytest.raises(TransportError, match="not sent"):
        send(sender, 2, LARGE)
    with pytest.raises(QueueEmptyError):
        receive(receivers[0])

    sockets[1] = good
    send(sender, 3, LARGE)
    assert [receive(receiver) for receiver in receivers] == [(3, LARGE)] * 2
    assert [receiver._oversize.num_passed_over for receiver in receivers] == [1, 0]


class FullSocket:
    """A socket whose queue takes nothing."""

    def send(self, *args: Any, **options: Any) -> None:
        raise zmq.Again


def test_a_payload_that_skips_its_ticket_is_a_protocol_error(make_channel: MakeChannel) -> None:
    sender, (receiver,) = make_channel()
    assert sender._oversize is not None
    ticket = sender._oversize.wait_room(4, None)
    _write_ticket(sender, ticket)
    _push(sender, ticket.serial + 1, b"next")

    with pytest.raises(ProtocolError):
        receive(receiver, soon())


def test_a_writer_that_died_before_its_payload_came_is_noticed(make_channel: MakeChannel) -> None:
    alive = threading.Event()
    alive.set()
    sender, (receiver,) = make_channel(is_writer_alive=alive.is_set)
    assert sender._oversize is not None
    _write_ticket(sender, sender._oversize.wait_room(10, None))
    alive.clear()
    began_at = time.monotonic()

    with pytest.raises(QueueClosedError):
        receive(receiver, math.inf)
    assert time.monotonic() - began_at < 1.0


def test_what_was_sent_before_the_closing_is_still_read(make_channel: MakeChannel) -> None:
    sender, (receiver,) = make_channel()
    send(sender, 1, LARGE)
    send(sender, 2, LARGE)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(receive(receiver, soon())[0] for _ in range(2)))
    thread.start()
    sender.close()
    thread.join()

    assert got == [1, 2]
    with pytest.raises(QueueClosedError):
        receive(receiver, soon())


def test_a_sender_closes_in_time_when_nobody_reads(make_channel: MakeChannel) -> None:
    sender, _ = make_channel()
    send(sender, 1, LARGE)
    began_at = time.monotonic()
    sender.close()

    assert time.monotonic() - began_at < 2.0


def _write_ticket(sender: Sender, ticket: Ticket) -> None:
    sender.ring.write(*sender._encoder.encode(FrameKind.TICKET, 0, ticket))


def _push(sender: Sender, serial: int, payload: bytes) -> None:
    assert sender._oversize is not None
    sender._oversize._sockets[0].send_multipart([serial.to_bytes(8, "little"), payload])


# Processes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner("test")
    spawner.start()
    yield spawner
    spawner.close()


def spawn_peer(
    spawner: Spawner, function: str, segment: SharedSegment, *, index: int = 0, stall_seed: int | None = None
) -> ChildProcess:
    args = PeerArgs(fd=segment.fd, size=segment.size, index=index, stall_seed=stall_seed)
    return spawner.spawn(
        ChildSpec(
            role=f"test {function} {index}",
            target=f"support.ring_peers:{function}",
            args=msgspec.msgpack.encode(args),
            pass_fds=(segment.fd,),
        )
    )


def test_processes_of_different_speed_get_every_frame_of_any_size(spawner: Spawner) -> None:
    segment = create_ring("test", capacity=1 << 14, num_readers=3)
    children = [
        spawn_peer(spawner, "digest_frames", segment, index=index, stall_seed=index) for index in range(3)
    ]
    wait_all_ready(children, soon())
    sizes = random.Random(1)
    digest = hashlib.sha256()
    limits = OversizeLimits(max_unread_tickets=5, max_unread_bytes=2 << 20)
    sender = Sender(RingWriter(segment), epoch=0, rank=-1, oversize=limits)
    for number in range(400):
        size = sizes.choice((0, 100, 8000, 8200, 20_000, 300_000))
        payload = number.to_bytes(4, "little") * (size // 4)
        digest.update(payload)
        send(sender, number, payload, soon(60))
    # The last ones are read within the time that closing waits, or after it from what has arrived.
    sender.ring.wait_read(sender.ring.position, deadline_at=soon(60))
    sender.close()

    for child in children:
        assert child.wait(20) == 0
        assert child.receive() == [Note(digest.digest())]
        child.stop(reason="test", timeout_s=5)


def test_a_sender_notices_a_reader_that_was_killed(spawner: Spawner) -> None:
    segment = create_ring("test", capacity=CAPACITY, num_readers=1)
    child = spawn_peer(spawner, "die_at_the_first_large_frame", segment)
    wait_all_ready([child], soon())
    ring = RingWriter(segment, is_peer_alive=lambda: child.exitcode is None)
    sender = Sender(ring, epoch=0, rank=-1, oversize=OversizeLimits(max_unread_tickets=2))
    send(sender, 1, LARGE)
    send(sender, 2, LARGE)
    child.wait(20)
    began_at = time.monotonic()
    with pytest.raises(QueueClosedError):
        send(sender, 3, LARGE, math.inf)

    assert time.monotonic() - began_at < 1.0
    sender.close()
    child.stop(reason="test", timeout_s=5)


def test_a_reader_notices_a_sender_that_was_killed(spawner: Spawner) -> None:
    segment = create_ring("test", capacity=CAPACITY, num_readers=1)
    child = spawn_peer(spawner, "send_large_frames_and_die", segment)
    wait_all_ready([child], soon())
    ring = RingReader(segment, 0, is_peer_alive=lambda: child.exitcode is None)
    receiver = Receiver[int](ring, {FrameKind.REQUEST: int})
    assert receive(receiver, soon()) == (1, bytes(100_000))
    child.wait(20)
    began_at = time.monotonic()
    with pytest.raises(QueueClosedError):
        receive(receiver, math.inf)

    assert time.monotonic() - began_at < 1.0
    assert receiver._oversize._socket is not None
    address = receiver._oversize._socket.getsockopt(zmq.LAST_ENDPOINT).decode()
    receiver.close()
    child.stop(reason="test", timeout_s=5)
    folder = Path(address.removeprefix("ipc://").rstrip("\0")).parent
    wait_until(lambda: not folder.exists(), timeout_s=10, what="the removal of the dead sender's folder")
