"""UniprocExecutor: one rank in the caller's own process.

Called by: tests, and `LLM` in process. Serving never uses it: here a fault of the device takes the engine along.
Implements the Executor protocol; a step runs when it is submitted, or when its grammar masks are, so nothing is
ever outstanding.
"""

import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..shm.errors import ConfigError
from ..shm.status_board import Phase, RankStatus
from .calls import HookDone
from .hooks import HookOutcome, HookRegistry, check_hook_name, encode_argument, hook_outcome
from .messages import ExecutorReport, GrammarMasks, ModelRunnerOutput, SchedulerOutput
from .model_runner import no_masks
from .worker import Worker
from .worker_config import WorkerConfig

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class UniprocStep:
    """A step that is done, or waits for its grammar masks. Owner: the executor.

    output: None until it is done
    """

    scheduler_output: SchedulerOutput
    output: ModelRunnerOutput | None = None

    @property
    def is_done(self) -> bool:
        """True when `result` may be called."""
        return self.output is not None

    def result(self, timeout_s: float | None = None) -> ModelRunnerOutput:
        """Return the outcome; never blocks. To wait for a step that nobody gave its masks is a bug."""
        assert self.output is not None, "the step waits for its grammar masks"
        return self.output

    def cancel(self) -> None:
        """Nothing: the step is computed all the same."""


class UniprocExecutor:
    """See the module. One thread. Raises ConfigError (parallel.tensor_parallel_size) for several ranks."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        hooks: Sequence[str] = (),
        on_phase: Callable[[int, str], None] | None = None,
    ) -> None:
        if config.parallel.tensor_parallel_size != 1:
            raise ConfigError(
                "parallel.tensor_parallel_size", "must be 1 when the model runs in this process"
            )
        self._config = config
        self._hook_names = hooks
        self._hooks = HookRegistry()
        self._on_start_phase = on_phase
        self._status = RankStatus(phase=Phase.NOT_STARTED, since_at=0.0, call_id=0, step=0)
        self._call_id = 0
        self._step = 0
        self._worker: Worker | None = None
        self._unmasked: UniprocStep | None = None

    def start(self) -> ExecutorReport:
        """Load the model and make the KV cache. Raises ConfigError, WorkerError; nothing is left then."""
        self._hooks = HookRegistry(self._hook_names)
        worker = Worker(self._config, self._enter)
        try:
            report = worker.start()
            worker.initialize_kv_cache(report.num_kv_blocks)
        except BaseException:
            worker.close()
            raise
        self._worker = worker
        self._on_start_phase = None
        self._enter(Phase.IDLE)
        return ExecutorReport(
            num_kv_blocks=report.num_kv_blocks,
            block_size=self._config.cache.block_size,
            max_model_len=worker.max_model_len,
            vocab_size=worker.vocab_size,
            ranks=[report],
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step that needs no masks. An error closes the executor: the KV cache can't be trusted."""
        return self._execute(scheduler_output, no_masks)

    def submit_model(self, scheduler_output: SchedulerOutput) -> UniprocStep:
        """Compute one step now, or when its masks come."""
        assert self._unmasked is None, "the step before it waits for its grammar masks"
        step = UniprocStep(scheduler_output)
        if scheduler_output.needs_masks:
            self._unmasked = step
        else:
            step.output = self._execute(scheduler_output, no_masks)
        return step

    def submit_masks(self, masks: GrammarMasks) -> None:
        """Compute the step that waits for these masks."""
        step, self._unmasked = self._unmasked, None
        assert step is not None, "no step waits for these masks"
        assert step.scheduler_output.step == masks.step
        step.output = self._execute(step.scheduler_output, lambda: masks)

    def _execute(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks]
    ) -> ModelRunnerOutput:
        assert self._worker is not None, "the executor is not running"
        self._call_id += 1
        self._step = scheduler_output.step
        try:
            output = self._worker.execute_model(scheduler_output, receive_masks)
        except BaseException:
            self.close(reason="a step failed")
            raise
        self._enter(Phase.IDLE)
        return output

    def collective_rpc(
        self,
        name: str,
        argument: object = None,
        *,
        result_type: type[T] | None = None,
        timeout_s: float | None = None,
    ) -> list[HookOutcome[T]]:
        """Run a hook in this process; see Executor. It blocks as long as it takes."""
        assert self._worker is not None, "the executor is not running"
        check_hook_name(name, self._hook_names)
        encoded = encode_argument(argument)
        self._call_id += 1
        # The border of a call: whatever goes wrong in a hook ends the call only.
        try:
            answer = HookDone(self._hooks.run(self._worker, name, encoded))
        except Exception as error:
            sentence = f"{type(error).__name__}: {error}"
            return [HookOutcome(tp_rank=0, error=sentence, traceback=traceback.format_exc())]
        return [hook_outcome(0, answer, math.inf, result_type)]

    @property
    def phases(self) -> Sequence[RankStatus]:
        """What the one rank is doing."""
        return [self._status]

    def close(self, *, reason: str) -> None:
        """Free model and cache. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            log.info("executor closed reason=%s", reason)
            worker.close()

    def _enter(self, phase: str) -> None:
        self._status = RankStatus(
            phase=Phase.named(phase), since_at=time.monotonic(), call_id=self._call_id, step=self._step
        )
        if self._on_start_phase is not None:
            self._on_start_phase(0, phase)
