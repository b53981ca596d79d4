"""The worker process: one rank. Binds itself to its cores, starts the worker, then serves calls (worker_loop.py).

Called by: shm/child.py, as the target of a process that MultiprocExecutor started. Torch comes in with the worker
class, imported by name, after the parent has set the environment that torch reads at import.
Invariant: a call that must not come now ends the process with ExitCode.PROTOCOL.

When the parent dies: the process is killed (shm/child.py). When a peer rank dies: the executor kills this one.
"""

import os
import traceback
from collections.abc import Callable

import msgspec

from ..shm.channel import CallSequence, Receiver, Sender
from ..shm.child_context import ChildContext, StopFlag, import_for_good
from ..shm.codec import FrameKind
from ..shm.errors import ProtocolError
from ..shm.exit_codes import ExitCode
from ..shm.oversize import OversizeLimits
from ..shm.ring_buffer import RingReader, RingWriter
from ..shm.segment import SharedSegment
from ..shm.status_board import Phase, StatusBoard
from .calls import Call, WorkerArgs, WorkerFailure
from .hooks import HookRegistry
from .worker_config import WorkerConfig
from .worker_loop import PhaseClock, WorkerLike, WorkerLoop


def main(context: ChildContext) -> int:
    """Run one rank. Returns the exit code of the process."""
    args = msgspec.msgpack.decode(context.args, type=WorkerArgs)
    board = StatusBoard.attach(args.board_fd, args.num_slots)
    clock = PhaseClock(board.writer(args.slot), context.progress)
    clock.begin(Phase.IMPORT)
    if args.cpus is not None:
        # Before torch: its threads inherit the binding, and memory comes from the node that first touches it.
        os.sched_setaffinity(0, args.cpus)
    worker = _load_class(args.worker_class)(args.config, clock.begin)
    hooks = HookRegistry(args.hooks)
    report = worker.start()
    request_ring = RingReader(
        SharedSegment.attach(args.request_fd, args.request_bytes),
        args.config.tp_rank,
        is_peer_alive=_until(context.stop_requested),
    )
    reply_ring = RingWriter(
        SharedSegment.attach(args.reply_fd, args.reply_bytes),
        is_peer_alive=_until(context.stop_requested),
        doorbell_fd=args.doorbell_fd,
    )

    def tell_failure(failure: WorkerFailure) -> None:
        context.note(msgspec.msgpack.encode(failure))

    calls = Receiver[Call](request_ring, {FrameKind.REQUEST: Call})
    replies = Sender(reply_ring, epoch=args.epoch, rank=args.config.tp_rank, oversize=OversizeLimits())
    loop = WorkerLoop(
        worker,
        calls=calls,
        replies=replies,
        sequence=CallSequence(args.epoch),
        clock=clock,
        hooks=hooks,
        tell_failure=tell_failure,
    )
    context.ready(msgspec.msgpack.encode(msgspec.structs.replace(report, phases=clock.end_start())))
    try:
        return loop.run()
    except ProtocolError as error:
        context.failed(f"protocol: {error}", traceback.format_exc())
        return ExitCode.PROTOCOL
    finally:
        worker.close()
        replies.close()
        calls.close()


def _until(stop_requested: StopFlag) -> Callable[[], bool]:
    """Return a check that turns False when a stop is asked: to who waits, that is as good as a closed ring."""
    return lambda: not stop_requested.is_set()


def _load_class(name: str) -> Callable[[WorkerConfig, Callable[[str], None]], WorkerLike]:
    module, _, attribute = name.partition(":")
    loaded: Callable[[WorkerConfig, Callable[[str], None]], WorkerLike] = getattr(
        import_for_good(module), attribute
    )
    return loaded
