"""The closed set of calls from an executor to its workers, and their answers. Torch-free.

Called by: multiproc_executor.py encodes calls and decodes answers, worker_proc.py the other way round. Every
rank runs every call. A step is answered by rank 0 alone, every other call by all ranks; any rank may answer any
call with a `WorkerFailure` instead.
"""

import msgspec

from .messages import ModelRunnerOutput, SchedulerOutput
from .worker_config import WorkerConfig


class InitializeKVCache(msgspec.Struct, frozen=True, tag="initialize_kv_cache"):
    """Make the KV cache of `num_blocks` blocks, the null block included. Once, before the first step."""

    num_blocks: int


class ExecuteModel(msgspec.Struct, frozen=True, tag="execute_model"):
    """Compute one step."""

    scheduler_output: SchedulerOutput


class MemoryReport(msgspec.Struct, frozen=True, tag="memory_report"):
    """Say how much host memory the rank uses. A hook: an error ends the call, not the replica."""


Call = InitializeKVCache | ExecuteModel | MemoryReport


class KVCacheInitialized(msgspec.Struct, frozen=True, tag="kv_cache_initialized"):
    """The KV cache stands; how long it took."""

    duration_s: float


class StepDone(msgspec.Struct, frozen=True, tag="step_done"):
    """The outcome of one step."""

    output: ModelRunnerOutput


class RankMemory(msgspec.Struct, frozen=True, kw_only=True, tag="rank_memory"):
    """Host memory of one rank, in bytes: now, and at most so far."""

    tp_rank: int
    resident_bytes: int
    peak_resident_bytes: int


Reply = KVCacheInitialized | StepDone | RankMemory


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A call that failed on one rank.

    phase:     in which it was
    error:     one sentence: type and text of the exception
    failed_at: instant of time.monotonic(); the earliest of several is the cause of the others
    is_fatal:  the replica can no longer be trusted; False for hooks
    """

    tp_rank: int
    phase: str
    error: str
    traceback: str
    failed_at: float
    is_fatal: bool


class WorkerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is started with. All descriptors are inherited under the same numbers.

    worker_class: "module:class", imported in the worker process only
    request_*:    the ring that brings calls; this rank is its reader number `config.tp_rank`
    reply_*:      the ring that takes this rank's answers; doorbell_fd: eventfd to ring after each
    slot:         this rank's place on the status board
    """

    config: WorkerConfig
    worker_class: str
    epoch: int
    request_fd: int
    request_bytes: int
    reply_fd: int
    reply_bytes: int
    doorbell_fd: int
    board_fd: int
    num_slots: int
    slot: int
