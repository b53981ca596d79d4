"""The closed set of calls from an executor to its workers, and their answers. Torch-free.

Called by: multiproc_executor.py encodes calls and decodes answers, worker_loop.py the other way round. Every
rank runs every call. A step is answered by rank 0 alone, the masks that follow it by nobody, every other call by
all ranks. A call that fails on a rank is told by that rank as a `WorkerFailure`: a hook's takes the place of the
answer, any other goes over the lifeline, for it ends the replica whether anybody waits or not.
"""

import msgspec

from .messages import GrammarMasks, ModelRunnerOutput, SchedulerOutput
from .worker_config import WorkerConfig


class InitializeKVCache(msgspec.Struct, frozen=True, tag="initialize_kv_cache"):
    """Make the KV cache of `num_blocks` blocks, the null block included. Once, before the first step."""

    num_blocks: int


class ExecuteModel(msgspec.Struct, frozen=True, tag="execute_model"):
    """Compute one step."""

    scheduler_output: SchedulerOutput


class GiveMasks(msgspec.Struct, frozen=True, tag="give_masks"):
    """Let the step that waits for its grammar masks go on. The next call after such a step, and never answered."""

    masks: GrammarMasks


class RunHook(msgspec.Struct, frozen=True, tag="run_hook"):
    """Run the hook of that registered name. argument: msgpack of the hook's own type."""

    name: str
    argument: bytes


Call = InitializeKVCache | ExecuteModel | GiveMasks | RunHook


class KVCacheInitialized(msgspec.Struct, frozen=True, tag="kv_cache_initialized"):
    """The KV cache stands; how long it took."""

    duration_s: float


class StepDone(msgspec.Struct, frozen=True, tag="step_done"):
    """The outcome of one step."""

    output: ModelRunnerOutput


class HookDone(msgspec.Struct, frozen=True, tag="hook_done"):
    """What a hook returned, as msgpack."""

    result: bytes


Reply = KVCacheInitialized | StepDone | HookDone


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A call that failed on one rank.

    phase:     in which it was
    error:     one sentence: type and text of the exception
    failed_at: instant of time.monotonic(); the earliest of several is the cause of the others
    """

    tp_rank: int
    call_id: int
    phase: str
    error: str
    traceback: str
    failed_at: float


class WorkerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is started with. All descriptors are inherited under the same numbers.

    worker_class: "module:class", imported in the worker process only
    hooks:        "module:function" of the hooks beyond the built-in ones, likewise
    cpus:         cores that the process binds itself to before it imports anything large; None: all that it has
    request_*:    the ring that brings calls; this rank is its reader number `config.tp_rank`
    reply_*:      the ring that takes this rank's answers; doorbell_fd: eventfd to ring after each
    slot:         this rank's place on the status board
    """

    config: WorkerConfig
    worker_class: str
    hooks: tuple[str, ...]
    cpus: tuple[int, ...] | None
    epoch: int
    request_fd: int
    request_bytes: int
    reply_fd: int
    reply_bytes: int
    doorbell_fd: int
    board_fd: int
    num_slots: int
    slot: int
