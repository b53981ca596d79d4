"""Ends of a ring that tests run in child processes."""

import hashlib
import math
import os
import random
import select
import signal

import msgspec

from phalanx.shm.channel import Receiver, Sender
from phalanx.shm.child_context import ChildContext
from phalanx.shm.codec import FrameKind
from phalanx.shm.errors import QueueClosedError
from phalanx.shm.oversize import OversizeLimits
from phalanx.shm.ring_buffer import RingReader, RingWriter
from phalanx.shm.segment import SharedSegment


class PeerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Which segment, which end of it, how many records to write, and how often to stall."""

    fd: int
    size: int
    index: int = 0
    num_records: int = 0
    stall_seed: int | None = None


def record(number: int) -> bytes:
    """Return the bytes of record `number`: any size up to 100, told apart by content."""
    return number.to_bytes(4, "little") * (number * 7 % 26)


def digest_records(context: ChildContext) -> int:
    """Read until the writer closes; tell the digest of all that came."""
    args = msgspec.msgpack.decode(context.args, type=PeerArgs)
    digest = hashlib.sha256()
    with RingReader(SharedSegment.attach(args.fd, args.size), args.index) as ring:
        context.ready(b"")
        try:
            while True:
                with ring.read(deadline_at=math.inf) as view:
                    digest.update(view)
        except QueueClosedError:
            context.note(digest.digest())
    return 0


def write_records(context: ChildContext) -> int:
    """Write `num_records` records, then close."""
    args = msgspec.msgpack.decode(context.args, type=PeerArgs)
    with RingWriter(SharedSegment.attach(args.fd, args.size)) as ring:
        context.ready(b"")
        for number in range(args.num_records):
            ring.write(record(number), deadline_at=math.inf)
    return 0


def read_one_and_die(context: ChildContext) -> int:
    """Die without a word in the middle of reading the first record."""
    args = msgspec.msgpack.decode(context.args, type=PeerArgs)
    ring = RingReader(SharedSegment.attach(args.fd, args.size), args.index)
    context.ready(b"")
    with ring.read(deadline_at=math.inf):
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def write_one_and_die(context: ChildContext) -> int:
    """Publish one record, die while filling the second."""
    args = msgspec.msgpack.decode(context.args, type=PeerArgs)
    ring = RingWriter(SharedSegment.attach(args.fd, args.size))
    context.ready(b"")
    ring.write(b"last words")
    with ring.reserve(8) as view:
        view[:4] = b"half"
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def wait_idle(context: ChildContext) -> int:
    """Wait for a record that does not come."""
    args = msgspec.msgpack.decode(context.args, type=PeerArgs)
    with RingReader(SharedSegment.attach(args.fd, args.size), args.index) as ring:
        context.ready(b"")
        try:
            with ring.read(deadline_at=math.inf):
                return 1
        except QueueClosedError:
            return 0


def digest_frames(context: ChildContext) -> int:
    """Receive frames until the sender closes, stalling at random; tell the digest of all buffers that came."""
    args = msgspec.msgpack.decode(context.args, type=PeerArgs)
    digest = hashlib.sha256()
    stalls = random.Random(args.stall_seed)
    receiver = Receiver[int](
        RingReader(SharedSegment.attach(args.fd, args.size), args.index), {FrameKind.REQUEST: int}
    )
    context.ready(b"")
    try:
        while True:
            with receiver.receive(deadline_at=math.inf) as frame:
                stall(stalls)
                digest.update(frame.buffers[0])
    except QueueClosedError:
        context.note(digest.digest())
    receiver.close()
    return 0


def stall(stalls: random.Random) -> None:
    """Do nothing, give the core away, or be off it for a while, as the scheduler of a busy machine would have it."""
    match stalls.randrange(8):
        case 0:
            select.select([], [], [], stalls.random() * 2e-3)
        case 1 | 2:
            os.sched_yield()
        case _:
            pass


def digest_records_with_stalls(context: ChildContext) -> int:
    """As `digest_records`, stalling at random before and inside of reads."""
    args = msgspec.msgpack.decode(context.args, type=PeerArgs)
    digest = hashlib.sha256()
    stalls = random.Random(args.stall_seed)
    with RingReader(SharedSegment.attach(args.fd, args.size), args.index) as ring:
        context.ready(b"")
        try:
            while True:
                stall(stalls)
                with ring.read(deadline_at=math.inf) as view:
                    digest.update(view[: len(view) // 2])
                    stall(stalls)
                    digest.update(view[len(view) // 2 :])
        except QueueClosedError:
            context.note(digest.digest())
    return 0


def die_at_the_first_large_frame(context: ChildContext) -> int:
    """Die without a word while a payload that came beside the ring is being read."""
    args = msgspec.msgpack.decode(context.args, type=PeerArgs)
    receiver = Receiver[int](
        RingReader(SharedSegment.attach(args.fd, args.size), args.index), {FrameKind.REQUEST: int}
    )
    context.ready(b"")
    with receiver.receive(deadline_at=math.inf):
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def send_large_frames_and_die(context: ChildContext) -> int:
    """Send one large frame, wait until it was read, and die."""
    args = msgspec.msgpack.decode(context.args, type=PeerArgs)
    ring = RingWriter(SharedSegment.attach(args.fd, args.size))
    sender = Sender(ring, epoch=0, rank=0, oversize=OversizeLimits())
    context.ready(b"")
    sender.send(FrameKind.REQUEST, 1, 1, [bytes(100_000)], deadline_at=math.inf)
    ring.wait_read(ring.position, deadline_at=math.inf)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hold_one(context: ChildContext) -> int:
    """Begin to read the first record, and never end."""
    args = msgspec.msgpack.decode(context.args, type=PeerArgs)
    ring = RingReader(SharedSegment.attach(args.fd, args.size), args.index)
    context.ready(b"")
    with ring.read(deadline_at=math.inf):
        signal.pause()
    return 0


def write_one_and_stay(context: ChildContext) -> int:
    """Write one record, and nothing more."""
    args = msgspec.msgpack.decode(context.args, type=PeerArgs)
    ring = RingWriter(SharedSegment.attach(args.fd, args.size))
    context.ready(b"")
    ring.write(b"first")
    signal.pause()
    return 0
