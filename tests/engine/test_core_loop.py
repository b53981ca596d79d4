"""The loop of an engine core in this thread: what comes in while a step is under way."""

from collections.abc import Callable
from queue import SimpleQueue

import msgspec
import pytest

from phalanx.engine.core import EngineCore
from phalanx.engine.core_control import ControlKind, CoreControl, CoreControlDone, FrontEndGone
from phalanx.engine.core_io import (
    ClientOutputs,
    CoreInput,
    CoreOutput,
    Inbox,
    StopRequested,
    ThreadFailed,
)
from phalanx.engine.core_loop import EngineCoreLoop
from phalanx.engine.messages import (
    AdmittedMark,
    ClientHello,
    EngineCoreRequest,
    EngineStats,
    FinishReason,
)
from phalanx.workers.messages import ModelRunnerOutput, SchedulerOutput
from support.engine import make_engine_config, make_request
from support.engine_children import FakeExecutor, FakeStep
from support.step_outputs import write_out


class InterruptedExecutor(FakeExecutor):
    """Puts something into the inbox while the loop waits for the result of a step.

    items: by the number of the step
    """

    def __init__(self, inbox: Inbox, items: dict[int, CoreControl]) -> None:
        super().__init__()
        self.inbox = inbox
        self.items = items

    def submit_model(self, scheduler_output: SchedulerOutput) -> FakeStep:
        step = super().submit_model(scheduler_output)
        executor = self

        class InterruptedStep(FakeStep):
            def result(self) -> ModelRunnerOutput:
                item = executor.items.pop(self.scheduler_output.step, None)
                if item is not None:
                    executor.inbox.put(item)
                return super().result()

        interrupted = InterruptedStep(scheduler_output)
        interrupted.output = step.output
        return interrupted


class KeptOutput(CoreOutput):
    """Keeps what would be sent. on_report: told of each report"""

    def __init__(self, inbox: Inbox, on_report: Callable[[EngineStats], None] = lambda stats: None) -> None:
        super().__init__(None, inbox)
        self.kept: list[ClientOutputs] = []
        self.on_report = on_report

    def put(self, item: object) -> None:
        match item:
            case ClientOutputs():
                self.kept.append(item)
            case EngineStats():
                self.on_report(item)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("kind", list(ControlKind))
def test_what_the_parent_asks_while_a_step_is_under_way_is_done_after_it(
    max_steps_in_flight: int, kind: ControlKind
) -> None:
    inbox: Inbox = SimpleQueue()
    asked = CoreControl(call_id=4, kind=kind, timeout_s=1.0)
    executor = InterruptedExecutor(inbox, {3: asked})
    config = make_engine_config(max_steps_in_flight=max_steps_in_flight)
    core = EngineCore(config, executor, executor.start())
    output = KeptOutput(inbox)
    answers: list[CoreControlDone] = []

    def answered(done: CoreControlDone) -> None:
        answers.append(done)
        core._scheduler.check_invariants()
        inbox.put(StopRequested())

    loop = EngineCoreLoop(
        core, inbox, CoreInput("ipc:///nowhere", inbox), output, dp_rank=0, epoch=0, tell_parent=answered
    )
    inbox.put(make_request("a", max_tokens=20))

    loop.run()

    (answer,) = answers
    assert (answer.error is None) == (kind is not ControlKind.RESET_PREFIX_CACHE)
    said = [one for item in output.kept for one in write_out(item.outputs.outputs)]
    assert said[-1].finish_reason is FinishReason.ABORT
    assert core.num_unfinished_requests == 0
    # The token of the step that was under way was made before, and is not lost.
    assert len([token for one in said for token in one.new_token_ids]) >= 3


def test_a_loop_ends_with_any_thread_that_it_needs() -> None:
    inbox: Inbox = SimpleQueue()
    executor = FakeExecutor()
    core = EngineCore(make_engine_config(), executor, executor.start())
    loop = EngineCoreLoop(
        core, inbox, CoreInput("ipc:///nowhere", inbox), KeptOutput(inbox), dp_rank=0, epoch=0
    )
    cause = TypeError("no")
    inbox.put(ThreadFailed("kv-events", cause))

    with pytest.raises(RuntimeError, match="thread kv-events failed: no") as caught:
        loop.run()

    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("order", ["gone first", "hello first", "gone unseen"])
def test_what_a_front_end_has_sent_before_its_death_and_comes_after_it_is_for_nobody(order: str) -> None:
    inbox: Inbox = SimpleQueue()
    executor = FakeExecutor()
    core = EngineCore(make_engine_config(), executor, executor.start())
    marks: list[AdmittedMark] = []

    def stop_when_all_is_reported(stats: EngineStats) -> None:
        if inbox.empty() and stats.num_output_tokens_total and not core.num_unfinished_requests:
            marks.extend(stats.admitted)
            inbox.put(StopRequested())

    output = KeptOutput(inbox, stop_when_all_is_reported)
    loop = EngineCoreLoop(core, inbox, CoreInput("ipc:///nowhere", inbox), output, dp_rank=0, epoch=0)

    def hello(incarnation: int) -> ClientHello:
        return ClientHello(client_index=4, incarnation=incarnation, output_address="ipc:///nowhere/either")

    def request(name: str, incarnation: int, number: int) -> EngineCoreRequest:
        made = make_request(name, client_index=4, max_tokens=2)
        return msgspec.structs.replace(made, incarnation=incarnation, number=number)

    gone = FrontEndGone(client_index=4, incarnation=0)
    late = request("late", 0, 5000)
    match order:
        case "gone first":
            items = [hello(0), request("early", 0, 4999), gone, late, hello(1)]
        case "hello first":
            items = [hello(0), gone, hello(1), late]
        case _:
            items = [gone, hello(0), late, hello(1)]
    for item in [*items, request("new", 1, 1)]:
        inbox.put(item)

    loop.run()

    said = [one for item in output.kept for one in write_out(item.outputs.outputs)]
    assert {one.request_id for one in said} == {"new"}
    assert [(mark.incarnation, mark.number) for mark in marks] == [(1, 1)]
