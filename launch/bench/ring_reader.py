"""A reader of the ring benchmark: takes a frame, answers when it got it, and waits for the next.

Called by: shm/child.py, as the target of the processes that ring.py starts. It is what a worker does with a step,
without the step. When the parent dies: the process is killed (shm/child.py).
"""

import math
import time

import msgspec

from ...shm.channel import Receiver, Sender
from ...shm.child_context import ChildContext
from ...shm.codec import FrameKind
from ...shm.errors import QueueClosedError
from ...shm.exit_codes import ExitCode
from ...shm.ring_buffer import RingReader, RingWriter
from ...shm.segment import SharedSegment
from .turn import PAGE_BYTES

TARGET = "phalanx.launch.bench.ring_reader:main"


class ReaderArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Which reader this is, and its two rings."""

    index: int
    request_fd: int
    request_bytes: int
    reply_fd: int
    reply_bytes: int


class Ping(msgspec.Struct, frozen=True, array_like=True):
    """What is sent beside the payload, which travels as a raw buffer of the frame."""

    number: int


class Pong(msgspec.Struct, frozen=True, array_like=True):
    """received_ns: `time.monotonic_ns()` when the payload was readable in place."""

    received_ns: int


def main(context: ChildContext) -> int:
    """Answer every frame until the writer closes."""
    args = msgspec.msgpack.decode(context.args, type=ReaderArgs)
    requests = Receiver[Ping](
        RingReader(
            SharedSegment.attach(args.request_fd, args.request_bytes),
            args.index,
            is_peer_alive=lambda: not context.stop_requested.is_set(),
        ),
        {FrameKind.REQUEST: Ping},
    )
    replies = Sender(
        RingWriter(SharedSegment.attach(args.reply_fd, args.reply_bytes)), epoch=0, rank=args.index
    )
    context.ready(b"")
    try:
        while True:
            with requests.receive(deadline_at=math.inf) as frame:
                sum(frame.buffers[0][::PAGE_BYTES])
                pong = Pong(time.monotonic_ns())
                call_id = frame.call_id
            replies.send(FrameKind.REPLY, call_id, pong, deadline_at=math.inf)
    except QueueClosedError:
        return ExitCode.OK
