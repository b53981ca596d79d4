"""WorkerGroup: the processes of one replica's ranks, and the shared memory between them and their executor.

Called by: MultiprocExecutor, one thread. `start_workers` makes everything or, when anything fails, leaves nothing.
All ranks are spawned before any is awaited: they meet each other while they start.

When a worker dies, or fails in a step: `watch.failure` is set, the doorbell rings, and waits on the rings end.
"""

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import msgspec

from ..shm.channel import EXECUTOR_RANK, Receiver, Sender
from ..shm.codec import FrameKind
from ..shm.collective_arena import SLOT_BYTES, arena_bytes, create_arena
from ..shm.errors import ProcessError
from ..shm.oversize import OversizeLimits
from ..shm.process import ChildMessage, ChildProcess, ChildSpec, Progress, Spawner, wait_all_ready
from ..shm.ring_buffer import RingReader, RingWriter, create_ring, ring_bytes
from ..shm.segment import PlannedSegment
from ..shm.status_board import StatusBoard
from .calls import Reply, WorkerArgs, WorkerFailure
from .config import DeviceType, ExecutorConfig, ParallelConfig
from .messages import RankReport
from .numa import bind_cpu_rank, bind_gpu_rank, read_gpu_nodes, read_numa_nodes
from .rank_watch import RankWatch
from .stall import describe_child
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
        watch: RankWatch,
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
    arenas = [PlannedSegment(name=f"{role_prefix} collectives", num_bytes=arena_bytes(size, SLOT_BYTES))]
    return [requests, *replies, *(arenas if _needs_arena(parallel) else [])]


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
    on_failure: Callable[[ProcessError], None] | None,
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
            if on_failure is not None:
                on_failure(failure)

        def last_phase(child: ChildProcess) -> str:
            assert child.rank is not None
            status = board.read(first_slot + child.rank)
            return f"{status.phase} of call {status.call_id}"

        watch = RankWatch(ring_and_tell, last_phase)
        resources.callback(watch.stop)
        request_segment = create_ring(
            f"{role_prefix}-requests", capacity=config.request_ring_bytes, num_readers=num_ranks
        )
        request_ring = RingWriter(request_segment, is_peer_alive=lambda: watch.failure is None)
        sender = Sender(
            request_ring,
            epoch=epoch,
            rank=EXECUTOR_RANK,
            oversize=OversizeLimits(max_unread_bytes=config.max_oversize_bytes),
        )
        resources.callback(sender.close)
        reply_segments = []
        receivers = []
        for rank in range(num_ranks):
            segment = create_ring(
                f"{role_prefix}-tp{rank}-replies", capacity=config.reply_ring_bytes, num_readers=1
            )
            receiver = Receiver[Reply | WorkerFailure](
                RingReader(segment, 0, is_peer_alive=lambda: watch.failure is None),
                {FrameKind.REPLY: Reply, FrameKind.ERROR: WorkerFailure},
            )
            resources.callback(receiver.close)
            reply_segments.append(segment)
            receivers.append(receiver)

        children: list[ChildProcess] = []
        resources.callback(_end_all, children)
        arena_fd: int | None = None
        if _needs_arena(worker_configs[0].parallel):
            arena = create_arena(f"{role_prefix}-collectives", num_ranks=num_ranks, slot_bytes=SLOT_BYTES)
            resources.callback(arena.close)
            arena_fd = arena.fd
        parallel = worker_configs[0].parallel
        num_threads = _num_threads(worker_configs[0])
        bindings = _bind_ranks(worker_configs, config)
        with _rendezvous(num_ranks) as rendezvous_fd:
            for rank, worker_config in enumerate(worker_configs):
                worker_config = msgspec.structs.replace(
                    # Counted here, for all cores: a worker that is bound to some sees only those.
                    worker_config,
                    parallel=replace(parallel, num_threads=num_threads),
                )
                if rendezvous_fd is not None:
                    worker_config = msgspec.structs.replace(
                        worker_config, rendezvous=f"/proc/self/fd/{rendezvous_fd}", arena_fd=arena_fd
                    )
                args = WorkerArgs(
                    config=worker_config,
                    worker_class=worker_class,
                    hooks=config.hooks,
                    cpus=bindings[rank],
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
                fds = (args.request_fd, args.reply_fd, doorbell_fd, board.fd, rendezvous_fd, arena_fd)
                spec = ChildSpec(
                    role=f"{role_prefix} tp{rank}",
                    target=_WORKER_TARGET,
                    args=msgspec.msgpack.encode(args),
                    rank=rank,
                    pass_fds=tuple(fd for fd in fds if fd is not None),
                    env=_environment(num_threads),
                )
                children.append(spawner.spawn(spec))

            def tell_progress(child: ChildProcess, message: ChildMessage) -> None:
                if on_phase is not None and isinstance(message, Progress) and child.rank is not None:
                    on_phase(child.rank, message.phase)

            def tell_stall(missing: Sequence[ChildProcess]) -> None:
                reports = [describe_child(child, f"in {child.last_phase}") for child in missing]
                log.warning(
                    "the start waits for %d of %d ranks\n%s", len(missing), num_ranks, "\n".join(reports)
                )

            payloads = wait_all_ready(
                children,
                deadline_at,
                tell_progress,
                stall_report_s=config.stall_report_s,
                on_stall=tell_stall,
            )
        reports = [msgspec.msgpack.decode(payload, type=RankReport) for payload in payloads]
        watch.start(role_prefix, children)
        group = WorkerGroup(
            children=children,
            sender=sender,
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


def _needs_arena(parallel: ParallelConfig) -> bool:
    """True for ranks that may compute on CPU: they exchange through shared memory."""
    return parallel.tensor_parallel_size > 1 and parallel.device is not DeviceType.CUDA


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


def _num_threads(config: WorkerConfig) -> int:
    """Return the compute threads of each rank; one would else take all cores of the host."""
    parallel = config.parallel
    if parallel.num_threads is not None:
        return parallel.num_threads
    cores = len(os.sched_getaffinity(0))
    return 1 if parallel.device is DeviceType.CUDA else max(1, cores // config.num_host_ranks)


def _environment(num_threads: int) -> dict[str, str]:
    """Return the variables that torch and NCCL read at their start."""
    # The ranks of a replica are on one host, and nobody on another need reach them. gloo would look up the host's name,
    # and NCCL listen on the first interface that is not the loopback one. What the operator asks for comes first.
    interfaces = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        # 3 to 6 ms: threads that sleep within a step are woken late. With 10,000, 0.4 ms, float32 makes 7 % fewer
        # tokens/s, by turns. An idle compute thread burns a core no longer than that.
        "GOMP_SPINCOUNT": "200000",
        **{name: interface for name, interface in interfaces.items() if name not in os.environ},
    }


def _bind_ranks(
    worker_configs: Sequence[WorkerConfig], config: ExecutorConfig
) -> list[tuple[int, ...] | None]:
    """Return the cores of each rank of this replica; None for one that is not bound."""
    nodes = read_numa_nodes()
    if not config.bind_numa or len(nodes) < 2:
        return [None] * len(worker_configs)
    allowed = os.sched_getaffinity(0)
    device = worker_configs[0].parallel.device
    gpu_nodes = [] if device is DeviceType.CPU else read_gpu_nodes(os.environ.get("CUDA_VISIBLE_DEVICES"))
    bindings = []
    for worker_config in worker_configs:
        if device is DeviceType.CPU or (device is DeviceType.AUTO and not gpu_nodes):
            cpus = bind_cpu_rank(
                nodes, allowed, rank=worker_config.host_rank, num_ranks=worker_config.num_host_ranks
            )
        else:
            cpus = bind_gpu_rank(nodes, allowed, gpu_nodes, device_index=worker_config.device_index)
        bindings.append(None if cpus is None else tuple(sorted(cpus)))
    return bindings
