"""The engine-core process of one replica: starts the workers, serves front ends, stops.

Called by: shm/child.py, as the target of a `ChildProcess`; the parent is the supervisor, or `ProcessCoreClient`.
The main thread runs the loop (core_loop.py); two threads have the sockets (core_io.py), and one those of the KV events
(kv_event_publisher.py).

When a worker dies or fails in a step: the reason goes to the parent, and the process ends with WORKER_LOST; when
something fails here, with FAILED. Its front ends learn of it from whoever watches the process. When the parent dies:
the lifeline ends this process.
"""

import logging
import os
import traceback
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from ..shm.child_context import ChildContext
from ..shm.errors import ProcessError
from ..shm.exit_codes import ExitCode
from ..shm.status_board import StatusBoard
from ..workers.executor import Executor, create_executor
from .core import EngineCore
from .core_args import EngineCoreArgs, EngineCoreReady
from .core_control import FromParent
from .core_io import CoreInput, CoreOutput, ExecutorFailed, GrammarReady, Inbox, StopRequested
from .core_loop import EngineCoreLoop
from .kv_event_publisher import KVEventPublisher

log = logging.getLogger(__name__)

MakeExecutor = Callable[
    [EngineCoreArgs, Callable[[int, str], None], Callable[[ProcessError], None]], Executor
]
"""(arguments, on_phase, on_failure) -> an executor that is not started yet."""


def main(context: ChildContext) -> int:
    """Run an engine core on real workers."""
    return run_engine_core(context, _make_multiproc_executor)


def run_engine_core(context: ChildContext, make_executor: MakeExecutor) -> int:
    """Start, serve until stopped, and return the exit code.

    Raises StartupError or ConfigError when the workers do not come up; nothing is left running then.
    """
    args = msgspec.msgpack.decode(context.args, type=EngineCoreArgs)
    inbox: Inbox = SimpleQueue()

    def on_phase(tp_rank: int, phase: str) -> None:
        context.progress(f"tp{tp_rank} {phase}")

    def on_failure(error: ProcessError) -> None:
        inbox.put(ExecutorFailed(error))

    core_input = CoreInput(args.input_address, inbox)
    core_output = CoreOutput(args.stats_address, inbox)
    publisher = _make_publisher(args, inbox)
    executor = make_executor(args, on_phase, on_failure)
    board = _attach_board(args)
    reason = "start failed"
    try:
        report = executor.start()
        core = EngineCore(
            args.config,
            executor,
            report,
            dp_rank=args.dp_rank,
            epoch=args.epoch,
            on_grammar=lambda: inbox.put(GrammarReady()),
        )
        core_input.start()
        core_output.start()
        if publisher is not None:
            publisher.start()
        core.is_paused = args.is_paused
        context.on_stop(lambda: inbox.put(StopRequested()))
        context.on_message(lambda data: inbox.put(msgspec.msgpack.decode(data, type=FromParent)))
        slot = board.writer(args.first_board_slot) if board is not None else None
        context.ready(msgspec.msgpack.encode(EngineCoreReady(report=core.report, pid=os.getpid())))
        reason = "failed"
        log.info("engine core ready dp_rank=%d kv_blocks=%d", args.dp_rank, core.report.num_kv_blocks)
        loop = EngineCoreLoop(
            core,
            inbox,
            core_input,
            core_output,
            publisher,
            dp_rank=args.dp_rank,
            epoch=args.epoch,
            slot=slot,
            tell_parent=lambda done: context.note(msgspec.msgpack.encode(done)),
        )
        loop.run()
        reason = "stop requested"
        return ExitCode.OK
    except ProcessError as error:
        reason = str(error)
        if not context.is_ready:
            raise
        # The exit code and this sentence are all that the supervisor needs to judge the replica.
        context.failed(reason, "".join(traceback.format_exception(error)))
        log.error("engine core ends dp_rank=%d reason=%s", args.dp_rank, reason)
        return ExitCode.WORKER_LOST
    finally:
        core_input.close()
        core_output.close()
        if publisher is not None:
            publisher.close()
        executor.close(reason=reason)


def _make_publisher(args: EngineCoreArgs, inbox: Inbox) -> KVEventPublisher | None:
    config = args.config.scheduler
    if config.kv_events_address is None:
        return None
    replay_address = config.kv_events_replay_address
    if replay_address is not None:
        replay_address = replay_address.replace("{dp_rank}", str(args.dp_rank))
    return KVEventPublisher(
        config.kv_events_address.replace("{dp_rank}", str(args.dp_rank)), replay_address, inbox
    )


def _attach_board(args: EngineCoreArgs) -> StatusBoard | None:
    """Map the status board, for one user: who closes a board closes its descriptor."""
    if args.board_fd is None:
        return None
    return StatusBoard.attach(os.dup(args.board_fd), args.num_board_slots)


def _make_multiproc_executor(
    args: EngineCoreArgs,
    on_phase: Callable[[int, str], None],
    on_failure: Callable[[ProcessError], None],
) -> Executor:
    config = args.config
    return create_executor(
        model=config.model,
        cache=config.cache,
        parallel=config.parallel,
        executor=config.executor,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        first_device_index=args.device_indices[0] if args.device_indices else 0,
        first_host_rank=args.dp_rank * config.parallel.tensor_parallel_size,
        num_host_ranks=args.num_host_ranks,
        expected_free_bytes=args.expected_free_bytes,
        role_prefix=f"dp{args.dp_rank}",
        epoch=args.epoch,
        board=_attach_board(args),
        first_slot=args.first_board_slot + 1,
        on_phase=on_phase,
        on_failure=on_failure,
    )
