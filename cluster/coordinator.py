"""The coordinator process: collects every replica's load and publishes it to the front ends.

Started by the supervisor. Engine cores push `EngineStats`, front ends subscribe to `LoadSnapshot`. It holds no
state that the next reports would not bring again. A malformed report is counted and logged, never fatal.
"""

import logging
import math
import time

import msgspec
import zmq

from ..engine.messages import EngineStats
from ..shm.child_context import ChildContext
from ..shm.exit_codes import ExitCode
from ..shm.sockets import bind_pub, bind_pull
from ..shm.status_board import Phase, StatusBoard, StatusSlot
from .load_table import LoadTable
from .messages import BoardPlace

log = logging.getLogger(__name__)


class CoordinatorArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Where reports come in, and where snapshots go out. board: None: nobody watches it."""

    stats_address: str
    snapshot_address: str
    board: BoardPlace | None = None


def main(context: ChildContext) -> int:
    """Run until told to stop."""
    args = msgspec.msgpack.decode(context.args, type=CoordinatorArgs)
    with zmq.Context() as zmq_context:
        reports = bind_pull(zmq_context, args.stats_address)
        snapshots = bind_pub(zmq_context, args.snapshot_address)
        # ZMQ retries a wait that a signal interrupts, so a stop has to arrive as a message.
        bell_in, bell_out = zmq_context.socket(zmq.PAIR), zmq_context.socket(zmq.PAIR)
        bell_in.bind("inproc://stop")
        bell_out.connect("inproc://stop")
        context.on_stop(lambda: bell_out.send(b"", zmq.NOBLOCK))
        try:
            slot = _board_slot(args.board)
            context.ready(b"")
            _serve(context, reports, snapshots, bell_in, slot)
        finally:
            for socket in (reports, snapshots, bell_in, bell_out):
                socket.close(linger=0)
    return ExitCode.OK


def _board_slot(place: BoardPlace | None) -> StatusSlot | None:
    """Map the status board, for as long as the process lives."""
    if place is None:
        return None
    return StatusBoard.attach(place.fd, place.num_slots).writer(place.slot)


def _serve(
    context: ChildContext,
    reports: "zmq.Socket[bytes]",
    snapshots: "zmq.Socket[bytes]",
    bell: "zmq.Socket[bytes]",
    slot: StatusSlot | None,
) -> None:
    table = LoadTable()
    decoder = msgspec.msgpack.Decoder(EngineStats)
    encoder = msgspec.msgpack.Encoder()
    poller = zmq.Poller()
    poller.register(reports, zmq.POLLIN)
    poller.register(bell, zmq.POLLIN)
    num_malformed = 0
    while not context.stop_requested.is_set():
        # At the latest after the interval at rest: who does not write for longer hangs.
        if slot is not None:
            slot.set(Phase.SERVING)
        # Rounded up: a wait that ends before its time would spin through the last millisecond.
        wait_ms = math.ceil(max(0.0, table.due_at() - time.monotonic()) * 1000)
        if reports in dict(poller.poll(wait_ms)):
            try:
                table.report(decoder.decode(reports.recv(zmq.NOBLOCK)))
            except msgspec.DecodeError as error:
                num_malformed += 1
                log.warning("malformed report dropped total=%d error=%s", num_malformed, error)
        snapshot = table.publish(time.monotonic())
        if snapshot is not None:
            snapshots.send(encoder.encode(snapshot))
