"""Ends of a ring that tests run in child processes."""

import hashlib
import math
import os
import signal

import msgspec

from phalanx.shm.child_context import ChildContext
from phalanx.shm.errors import QueueClosedError
from phalanx.shm.ring_buffer import RingReader, RingWriter
from phalanx.shm.segment import SharedSegment


class PeerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Which segment, which end of it, and how many records to write."""

    fd: int
    size: int
    index: int = 0
    num_records: int = 0


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
