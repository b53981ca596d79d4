"""WorkerGroup: the processes of one replica's ranks, and the shared memory between them and their executor.

Called by: MultiprocExecutor, one thread. `start_workers` makes everything or, when anything fails, leaves nothing.
All ranks are spawned before any is awaited: they meet each other while they start.

When a worker dies: `watch.failure` is set, the doorbell rings, and waits on the rings end.
"""

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import msgspec

from ..shm.channel import EXECUTOR_RANK, Receiver, Sender
from ..shm.codec import FrameKind
from ..shm.errors import ProcessError
from ..shm.process import ChildMessage, ChildProcess, ChildSpec, Progress, Spawner, wait_all_ready
from ..shm.ring_buffer import RingReader, RingWriter, create_ring, ring_bytes
from ..shm.segment import PlannedSegment
from ..shm.status_board import StatusBoard
from .calls import Reply, WorkerArgs, WorkerFailure
from .config import DeviceType, ExecutorConfig, ParallelConfig
from .death_watch import DeathWatch
from .messages import RankReport
from .worker_config import WorkerConfig

_WORKER_TARGET = "phalanx.workers.worker_proc:main"

log = logging.getLogger(__name__)


class WorkerGroup:
    """Live workers. Made by `start_workers`.

    sender:    brings calls to all ranks
    receivers: bring the answers, by tp_rank
    board:     says what the ranks do, from slot `first_slot` on
    """

    def __init__(
        self,
        *,
        children: Sequence[ChildProcess],
        sender: Sender,
        receivers: Sequence[Receiver[Reply | WorkerFailure]],
        board: StatusBoard,
        first_slot: int,
        watch: DeathWatch,
        doorbell_fd: int,
        resources: ExitStack,
    ) -> None:
        self.children = children
        self.sender = sender
        self.receivers = receivers
        self.board = board
        self.first_slot = first_slot
        self.watch = watch
        self._doorbell_fd = doorbell_fd
        self._resources = resources
        self._poller = select.poll()
        self._poller.register(doorbell_fd, select.POLLIN)

    def wait_bell(self, timeout_s: float) -> None:
        """Sleep until an answer was sent or a worker died, at most `timeout_s`; also returns for no reason.

        The bell is silent afterwards: look at everything it may have rung for, then wait again.
        """
        if self._poller.poll(max(0.0, timeout_s) * 1000):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._doorbell_fd)

    def close(self, *, grace_s: float) -> None:
        """End all workers and free everything; once.

        grace_s: how long they may take to leave by themselves; 0 kills at once. Bounded by that and what
        `ChildProcess.stop` takes after a kill.
        """
        self.watch.stop()
        if grace_s > 0:
            # Closing the ring ends who waits for a call; the signal ends who waits for room to answer.
            self.sender.close()
            for child in self.children:
                child.terminate()
            deadline_at = time.monotonic() + grace_s
            for child in self.children:
                child.wait(deadline_at - time.monotonic())
        self._resources.close()


def planned_segments(
    executor: ExecutorConfig, parallel: ParallelConfig, role_prefix: str
) -> list[PlannedSegment]:
    """Return the shared memory that the workers of one replica will need."""
    size = parallel.tensor_parallel_size
    requests = PlannedSegment(
        name=f"{role_prefix} requests", num_bytes=ring_bytes(executor.request_ring_bytes, size)
    )
    replies = [
        PlannedSegment(
            name=f"{role_prefix} tp{tp_rank} replies", num_bytes=ring_bytes(executor.reply_ring_bytes, 1)
        )
        for tp_rank in range(size)
    ]
    return [requests, *replies]


def start_workers(
    worker_configs: Sequence[WorkerConfig],
    *,
    config: ExecutorConfig,
    role_prefix: str,
    epoch: int,
    worker_class: str,
    board: StatusBoard | None,
    first_slot: int,
    deadline_at: float,
    on_phase: Callable[[int, str], None] | None,
    on_death: Callable[[ProcessError], None] | None,
) -> tuple[WorkerGroup, list[RankReport]]:
    """Start all ranks and wait until they have loaded the model.

    Raises StartupError or ConfigError, as `wait_all_ready`; TransportError when there is no shared memory.
    """
    num_ranks = len(worker_configs)
    with ExitStack() as resources:
        spawner = Spawner(role_prefix)
        spawner.start()
        resources.callback(spawner.close)
        if board is None:
            board = StatusBoard.create(num_ranks)
            first_slot = 0
            resources.callback(board.close)
        doorbell_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        resources.callback(os.close, doorbell_fd)

        def ring_and_tell(failure: ProcessError) -> None:
            os.eventfd_write(doorbell_fd, 1)
            if on_death is not None:
                on_death(failure)

        def last_phase(child: ChildProcess) -> str:
            assert child.rank is not None
            status = board.read(first_slot + child.rank)
            return f"{status.phase} of call {status.call_id}"

        watch = DeathWatch(ring_and_tell, last_phase)
        resources.callback(watch.stop)
        request_segment = create_ring(
            f"{role_prefix}-requests", capacity=config.request_ring_bytes, num_readers=num_ranks
        )
        request_ring = RingWriter(request_segment, is_peer_alive=lambda: watch.failure is None)
        resources.callback(request_ring.close)
        reply_segments = []
        receivers = []
        for rank in range(num_ranks):
            segment = create_ring(
                f"{role_prefix}-tp{rank}-replies", capacity=config.reply_ring_bytes, num_readers=1
            )
            receiver = Receiver[Reply | WorkerFailure](
                RingReader(segment, 0), {FrameKind.REPLY: Reply, FrameKind.ERROR: WorkerFailure}
            )
            resources.callback(receiver.close)
            reply_segments.append(segment)
            receivers.append(receiver)

        children: list[ChildProcess] = []
        resources.callback(_end_all, children)
        with _rendezvous(num_ranks) as rendezvous_fd:
            for rank, worker_config in enumerate(worker_configs):
                if rendezvous_fd is not None:
                    worker_config = msgspec.structs.replace(
                        worker_config, rendezvous=f"/proc/self/fd/{rendezvous_fd}"
                    )
                args = WorkerArgs(
                    config=worker_config,
                    worker_class=worker_class,
                    epoch=epoch,
                    request_fd=request_segment.fd,
                    request_bytes=request_segment.size,
                    reply_fd=reply_segments[rank].fd,
                    reply_bytes=reply_segments[rank].size,
                    doorbell_fd=doorbell_fd,
                    board_fd=board.fd,
                    num_slots=board.num_slots,
                    slot=first_slot + rank,
                )
                fds = (args.request_fd, args.reply_fd, doorbell_fd, board.fd, rendezvous_fd)
                spec = ChildSpec(
                    role=f"{role_prefix} tp{rank}",
                    target=_WORKER_TARGET,
                    args=msgspec.msgpack.encode(args),
                    rank=rank,
                    pass_fds=tuple(fd for fd in fds if fd is not None),
                    env=_thread_environment(worker_config.parallel),
                )
                children.append(spawner.spawn(spec))

            def tell_progress(child: ChildProcess, message: ChildMessage) -> None:
                if on_phase is not None and isinstance(message, Progress) and child.rank is not None:
                    on_phase(child.rank, message.phase)

            payloads = wait_all_ready(children, deadline_at, tell_progress)
        reports = [msgspec.msgpack.decode(payload, type=RankReport) for payload in payloads]
        watch.start(role_prefix, children)
        group = WorkerGroup(
            children=children,
            sender=Sender(request_ring, epoch=epoch, rank=EXECUTOR_RANK),
            receivers=receivers,
            board=board,
            first_slot=first_slot,
            watch=watch,
            doorbell_fd=doorbell_fd,
            resources=resources.pop_all(),
        )
    return group, reports


@contextlib.contextmanager
def _rendezvous(num_ranks: int) -> Iterator[int | None]:
    """Make the file in which the ranks find each other; ours is closed again once they have."""
    if num_ranks == 1:
        yield None
        return
    fd = os.memfd_create("phalanx-rendezvous", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _end_all(children: Sequence[ChildProcess]) -> None:
    """Kill who still lives, and reap all. Those that gave up their lives already are not touched."""
    for child in children:
        child.kill()
    problems: list[ProcessError] = []
    for child in children:
        try:
            child.stop(reason="the executor closes", timeout_s=0.0)
        except ProcessError as error:
            problems.append(error)
    for problem in problems:
        log.error("%s", problem)


def _thread_environment(parallel: ParallelConfig) -> dict[str, str]:
    """Return the variables that torch reads at import; each rank would else take all cores of the host."""
    num_threads = parallel.num_threads
    if num_threads is None:
        cores = len(os.sched_getaffinity(0))
        is_cuda = parallel.device is DeviceType.CUDA
        num_threads = 1 if is_cuda else max(1, cores // parallel.tensor_parallel_size)
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        # The ranks of a replica are on one host; gloo would else look up the host's name.
        "GLOO_SOCKET_IFNAME": "lo",
    }
