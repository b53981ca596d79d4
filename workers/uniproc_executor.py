"""UniprocExecutor: one rank in the caller's own process.

Called by: tests, and `LLM` in process. Serving never uses it: here a fault of the device takes the engine along.
Implements the Executor protocol; a step is launched when it is submitted, or when its grammar masks are. On a GPU it
is computed while the caller goes on, on CPU before the call returns.
"""

import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ..shm.errors import ConfigError
from ..shm.status_board import Phase, RankStatus
from .calls import HookDone
from .capture_bar import CaptureBar
from .hooks import HookOutcome, HookRegistry, check_hook_name, encode_argument, hook_outcome
from .messages import ExecutorReport, GrammarMasks, ModelRunnerOutput, SchedulerOutput
from .model_runner import no_masks
from .step_in_flight import StepInFlight
from .worker import Worker
from .worker_config import WorkerConfig

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class UniprocStep:
    """A step that was launched, or waits for its grammar masks. Owner: the executor.

    launched: None until it is
    """

    executor: "UniprocExecutor"
    scheduler_output: SchedulerOutput
    launched: StepInFlight | None = None

    @property
    def is_done(self) -> bool:
        """True when `result` returns at once."""
        return self.launched is not None and self.launched.is_done

    def result(self, timeout_s: float | None = None) -> ModelRunnerOutput:
        """Wait for the outcome, whatever `timeout_s` says: a device that hangs cannot be left from its own process.

        To wait for a step that nobody gave its masks is a bug. An error closes the executor.
        """
        assert self.launched is not None, "the step waits for its grammar masks"
        return self.executor.wait_for(self.launched)

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
        with CaptureBar() as bar:
            worker = Worker(self._config, self._enter, bar.advance)
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
            ranks=[msgspec.structs.replace(report, phases=worker.phases)],
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step that needs no masks. An error closes the executor: the KV cache can't be trusted."""
        return self.submit_model(scheduler_output).result()

    def submit_model(self, scheduler_output: SchedulerOutput) -> UniprocStep:
        """Launch one step now, or when its masks come. An error closes the executor: the KV cache can't be trusted."""
        assert self._unmasked is None, "the step before it waits for its grammar masks"
        step = UniprocStep(self, scheduler_output)
        if scheduler_output.needs_masks:
            self._unmasked = step
        else:
            step.launched = self._launch(scheduler_output, no_masks)
        return step

    def submit_masks(self, masks: GrammarMasks) -> None:
        """Launch the step that waits for these masks."""
        step, self._unmasked = self._unmasked, None
        assert step is not None, "no step waits for these masks"
        assert step.scheduler_output.step == masks.step
        step.launched = self._launch(step.scheduler_output, lambda: masks)

    def wait_for(self, launched: StepInFlight) -> ModelRunnerOutput:
        """Wait for a step. An error closes the executor."""
        try:
            return launched.wait()
        except BaseException:
            self.close(reason="a step failed")
            raise

    def _launch(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks]
    ) -> StepInFlight:
        assert self._worker is not None, "the executor is not running"
        self._call_id += 1
        self._step = scheduler_output.step
        try:
            launched = self._worker.begin_step(scheduler_output, receive_masks)
        except BaseException:
            self.close(reason="a step failed")
            raise
        self._enter(Phase.IDLE)
        return launched

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
