"""Executor: the engine's one handle to all workers of a replica.

Called by: the engine core (and the in-process `LLM`), from one thread. Two implementations:
`MultiprocExecutor` (one process per rank; serving always uses it) and `UniprocExecutor` (tests, and `LLM` in
process). This module imports no torch.

Any error of a step, and the death of any rank, ends the replica: the KV cache can no longer be trusted. The
executor has closed itself when such an error reaches the caller.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..shm.errors import ProcessError
from ..shm.status_board import RankStatus, StatusBoard
from .config import CacheConfig, ExecutorConfig, ModelConfig, ParallelConfig
from .hooks import HookOutcome
from .messages import ExecutorReport, GrammarMasks, ModelRunnerOutput, SchedulerOutput
from .multiproc_executor import MultiprocExecutor
from .worker_config import WorkerConfig

T = TypeVar("T")


class PendingStep(Protocol):
    """A step that was submitted."""

    @property
    def is_done(self) -> bool:
        """True when `result` returns at once. Never blocks. Raises ProcessError."""
        ...

    def result(self, timeout_s: float | None = None) -> ModelRunnerOutput:
        """Wait for the step's outcome; again returns the same.

        Blocks at most `timeout_s` (QueueTimeoutError: the step goes on), and at most the step timeout, counted from
        the submission or from the end of the step before (ProcessHungError). Raises ProcessError, CallCancelledError.
        """
        ...

    def cancel(self) -> None:
        """Give up the outcome, never the step: all ranks compute it, and the answer is dropped."""
        ...


class Executor(Protocol):
    """Runs one replica's model. One thread; `close` may come from the same thread at any time."""

    def start(self) -> ExecutorReport:
        """Start all ranks, load the model and make the KV cache.

        Blocks at most the start timeout. Raises StartupError or ConfigError; nothing is left running then.
        """
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step that needs no grammar masks: `submit_model(...).result()`."""
        ...

    def submit_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Begin one step and return at once; steps run in the order of submission. Raises ProcessError."""
        ...

    def submit_masks(self, masks: GrammarMasks) -> None:
        """Give the step that was submitted last the masks that it needs; once, and before anything else is submitted.

        Its forward pass may have run by now, and it does not sample before. Raises ProcessError.
        """
        ...

    def collective_rpc(
        self,
        name: str,
        argument: object = None,
        *,
        result_type: type[T] | None = None,
        timeout_s: float | None = None,
    ) -> list[HookOutcome[T]]:
        """Run the hook of that registered name on all ranks, behind the steps under way (see hooks.py).

        Returns what came of it on each rank, by tp_rank; an error on one does not end the replica. timeout_s: None:
        the call timeout. Raises ValueError for an unknown name, TypeError for an argument that msgpack cannot carry,
        ProcessError.
        """
        ...

    @property
    def phases(self) -> Sequence[RankStatus]:
        """What each rank is doing, by tp_rank."""
        ...

    def close(self, *, reason: str) -> None:
        """End all ranks and free everything. Bounded, idempotent; `reason` ends in the log."""
        ...


def make_worker_configs(
    *,
    model: ModelConfig,
    cache: CacheConfig,
    parallel: ParallelConfig,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    first_device_index: int = 0,
    first_host_rank: int = 0,
    num_host_ranks: int | None = None,
    expected_free_bytes: Sequence[int | None] = (),
) -> list[WorkerConfig]:
    """Return one WorkerConfig per rank, on consecutive devices.

    num_host_ranks: of all replicas; None: of this one
    expected_free_bytes: by tp_rank; empty: the ranks are started for the first time
    """
    return [
        WorkerConfig(
            model=model,
            cache=cache,
            parallel=parallel,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tp_rank=tp_rank,
            device_index=first_device_index + tp_rank,
            rendezvous=None,
            host_rank=first_host_rank + tp_rank,
            num_host_ranks=num_host_ranks or parallel.tensor_parallel_size,
            expected_free_bytes=expected_free_bytes[tp_rank] if expected_free_bytes else None,
        )
        for tp_rank in range(parallel.tensor_parallel_size)
    ]


def create_executor(
    *,
    model: ModelConfig,
    cache: CacheConfig,
    parallel: ParallelConfig,
    executor: ExecutorConfig,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    in_process: bool = False,
    first_device_index: int = 0,
    first_host_rank: int = 0,
    num_host_ranks: int | None = None,
    expected_free_bytes: Sequence[int | None] = (),
    role_prefix: str = "dp0",
    epoch: int = 0,
    board: StatusBoard | None = None,
    first_slot: int = 0,
    on_phase: Callable[[int, str], None] | None = None,
    on_failure: Callable[[ProcessError], None] | None = None,
) -> Executor:
    """Choose and build the executor; `start()` does the work.

    in_process: compute in this process (one rank only); imports torch here
    on_phase:   called with (tp_rank, phase) while the ranks start, from the thread that calls `start()`
    on_failure: called once, from a thread of the executor, when a rank dies or a step fails on one
    The rest: see make_worker_configs and MultiprocExecutor.
    """
    worker_configs = make_worker_configs(
        model=model,
        cache=cache,
        parallel=parallel,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        first_device_index=first_device_index,
        first_host_rank=first_host_rank,
        num_host_ranks=num_host_ranks,
        expected_free_bytes=expected_free_bytes,
    )
    if in_process:
        # Imports torch, which costs seconds and memory that an engine core does not have to pay.
        from .uniproc_executor import UniprocExecutor

        return UniprocExecutor(worker_configs[0], hooks=executor.hooks, on_phase=on_phase)
    return MultiprocExecutor(
        worker_configs,
        config=executor,
        role_prefix=role_prefix,
        epoch=epoch,
        board=board,
        first_slot=first_slot,
        on_phase=on_phase,
        on_failure=on_failure,
    )
