"""TimedExecutor: the executor that serves, with a clock at both ends of every step. Imports no torch.

Called by: an engine core that a benchmark runs in its own process (multi_gpu_steps.py). One thread.

When a worker dies: as the executor inside.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...shm.status_board import RankStatus
from ...workers.hooks import HookOutcome
from ...workers.messages import ExecutorReport, GrammarMasks, ModelRunnerOutput, SchedulerOutput
from ...workers.multiproc_executor import MultiprocExecutor, MultiprocStep

T = TypeVar("T")

NUM_KEPT = 32


@dataclass(slots=True, kw_only=True)
class SentStep:
    """One step as the engine core sees it; instants of time.monotonic().

    num_decoding: requests with one token of output; num_prompt_tokens: of all others. The last token of a prompt, if
                  alone in a step, passes for an output's
    submitted_at: before it is encoded; published_at: it stands in the ring, and who slept was woken
    answered_at:  its tokens are here; 0.0: they were not asked for yet
    """

    step: int
    num_decoding: int
    num_prompt_tokens: int
    submitted_at: float
    published_at: float
    answered_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """All tokens of the step."""
        return self.num_decoding + self.num_prompt_tokens


class TimedExecutor:
    """See executor.Executor.

    sent:     all steps so far, by their number
    kept:     the last few of them whole
    is_alone: wait for each step before the next one is sent, however many the engine core would have in flight
    """

    def __init__(self, executor: MultiprocExecutor) -> None:
        self._executor = executor
        self.sent: dict[int, SentStep] = {}
        self.kept: deque[SchedulerOutput] = deque(maxlen=NUM_KEPT)
        self.is_alone = False

    def start(self) -> ExecutorReport:
        """As the executor inside."""
        return self._executor.start()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """As the executor inside."""
        return self.submit_model(scheduler_output).result()

    def submit_model(self, scheduler_output: SchedulerOutput) -> "TimedStep":
        """As the executor inside; waits for the step when it is to be alone."""
        submitted_at = time.monotonic()
        pending = self._executor.submit_model(scheduler_output)
        num_decoding, num_prompt_tokens = count_tokens(scheduler_output)
        sent = SentStep(
            step=scheduler_output.step,
            num_decoding=num_decoding,
            num_prompt_tokens=num_prompt_tokens,
            submitted_at=submitted_at,
            published_at=time.monotonic(),
        )
        self.sent[sent.step] = sent
        self.kept.append(scheduler_output)
        step = TimedStep(pending, sent)
        if self.is_alone:
            step.result()
        return step

    def submit_masks(self, masks: GrammarMasks) -> None:
        """As the executor inside."""
        self._executor.submit_masks(masks)

    def collective_rpc(
        self,
        name: str,
        argument: object = None,
        *,
        result_type: type[T] | None = None,
        timeout_s: float | None = None,
    ) -> list[HookOutcome[T]]:
        """As the executor inside."""
        return self._executor.collective_rpc(name, argument, result_type=result_type, timeout_s=timeout_s)

    @property
    def phases(self) -> Sequence[RankStatus]:
        """As the executor inside."""
        return self._executor.phases

    def close(self, *, reason: str) -> None:
        """As the executor inside."""
        self._executor.close(reason=reason)


class TimedStep:
    """See executor.PendingStep."""

    def __init__(self, pending: MultiprocStep, sent: SentStep) -> None:
        self._pending = pending
        self._sent = sent

    @property
    def is_done(self) -> bool:
        """As the step inside."""
        return self._pending.is_done

    def result(self, timeout_s: float | None = None) -> ModelRunnerOutput:
        """As the step inside."""
        output = self._pending.result(timeout_s)
        if not self._sent.answered_at:
            self._sent.answered_at = time.monotonic()
        return output

    def cancel(self) -> None:
        """As the step inside."""
        self._pending.cancel()


def count_tokens(scheduled: SchedulerOutput) -> tuple[int, int]:
    """Return how many requests decode in a step, and how many tokens of prompts it has; see SentStep."""
    new = {request.request_id for request in scheduled.new_requests}
    prompts = [
        count
        for request_id, count in scheduled.num_scheduled_tokens.items()
        if count > 1 or request_id in new
    ]
    return len(scheduled.num_scheduled_tokens) - len(prompts), sum(prompts)
