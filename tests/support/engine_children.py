"""Engine-core processes on a fake executor, as targets of `ChildProcess`."""

import threading
from collections.abc import Callable, Sequence

from phalanx.engine.core_args import EngineCoreArgs
from phalanx.engine.core_proc import run_engine_core
from phalanx.shm.child_context import ChildContext
from phalanx.shm.errors import ProcessDiedError, ProcessError
from phalanx.shm.status_board import RankStatus
from phalanx.workers.hooks import HookOutcome
from phalanx.workers.messages import ExecutorReport, GrammarMasks, ModelRunnerOutput, SchedulerOutput
from support.engine import FakeModelRunner, make_report

POISON_STEP = 41
POISON_IDLE = 42
"""Prompts that begin with these tokens kill the worker: in the step, and right after it."""


class FakeExecutor:
    """An executor without workers: the fake model, run in place."""

    def __init__(
        self,
        *,
        on_phase: Callable[[int, str], None] = lambda rank, phase: None,
        on_failure: Callable[[ProcessError], None] = lambda error: None,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 97,
    ) -> None:
        self._report = make_report(num_blocks=num_blocks, block_size=block_size)
        self._runner = FakeModelRunner(block_size=block_size, vocab_size=vocab_size)
        self._on_phase = on_phase
        self._on_failure = on_failure
        self.close_reason: str | None = None
        self.num_steps = 0
        self._unmasked: FakeStep | None = None
        self.hooks: list[tuple[str, object]] = []
        self.hook_error: str | None = None

    def start(self) -> ExecutorReport:
        self._on_phase(0, "weights")
        return self._report

    def execute_model(
        self, scheduler_output: SchedulerOutput, masks: GrammarMasks | None = None
    ) -> ModelRunnerOutput:
        self.num_steps += 1
        first_tokens = {new.token_ids[0] for new in scheduler_output.new_requests}
        error = ProcessDiedError("dp0 tp1", rank=1, exitcode=-9)
        if POISON_STEP in first_tokens:
            raise error
        if POISON_IDLE in first_tokens:
            threading.Thread(target=self._on_failure, args=(error,)).start()
        return self._runner.execute(scheduler_output, masks)

    def submit_model(self, scheduler_output: SchedulerOutput) -> "FakeStep":
        assert self._unmasked is None, "the step before it waits for its masks"
        step = FakeStep(scheduler_output)
        if scheduler_output.needs_masks:
            self._unmasked = step
        else:
            step.output = self.execute_model(scheduler_output)
        return step

    def submit_masks(self, masks: GrammarMasks) -> None:
        step, self._unmasked = self._unmasked, None
        assert step is not None
        assert step.scheduler_output.step == masks.step
        step.output = self.execute_model(step.scheduler_output, masks)

    def collective_rpc(
        self,
        name: str,
        argument: object = None,
        *,
        result_type: object = None,
        timeout_s: float | None = None,
    ) -> list[HookOutcome[None]]:
        self.hooks.append((name, argument))
        return [HookOutcome(tp_rank=0, error=self.hook_error)]

    @property
    def phases(self) -> Sequence[RankStatus]:
        return []

    def close(self, *, reason: str) -> None:
        self.close_reason = reason


class FakeStep:
    def __init__(self, scheduler_output: SchedulerOutput) -> None:
        self.scheduler_output = scheduler_output
        self.output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        assert self.output is not None, "the step waits for its masks"
        return self.output


class FailingExecutor(FakeExecutor):
    def start(self) -> ExecutorReport:
        raise ProcessDiedError("dp0 tp0", rank=0, exitcode=3, detail="no such device")


def main(context: ChildContext) -> int:
    def make(
        args: EngineCoreArgs,
        on_phase: Callable[[int, str], None],
        on_failure: Callable[[ProcessError], None],
    ) -> FakeExecutor:
        return FakeExecutor(on_phase=on_phase, on_failure=on_failure)

    return run_engine_core(context, make)


def main_that_fails_to_start(context: ChildContext) -> int:
    return run_engine_core(context, lambda args, on_phase, on_failure: FailingExecutor())
