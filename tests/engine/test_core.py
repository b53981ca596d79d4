"""EngineCore over a fake executor, without sockets."""

import threading

import msgspec
import pytest

from phalanx.engine.control_calls import carry_out
from phalanx.engine.core import EngineCore
from phalanx.engine.core_control import ControlKind, CoreControl, CoreControlDone
from phalanx.engine.grammar.backend import GrammarError
from phalanx.engine.grammar.compiler_pool import NUM_THREADS
from phalanx.engine.messages import FinishReason
from phalanx.shm.errors import ProcessDiedError, ProcessError
from phalanx.workers.sampling_params import StructuredOutputs
from phalanx.workers.sleep import SleepLevel
from support.engine import make_engine_config, make_report, make_request, simulate
from support.engine_children import POISON_STEP, FakeExecutor
from support.step_outputs import write_out


def make_core(*, num_blocks=64, **scheduler):
    executor = FakeExecutor(num_blocks=num_blocks)
    return EngineCore(make_engine_config(**scheduler), executor, executor.start()), executor


def run(core):
    outputs = {}
    while core.has_work:
        for client_index, client_outputs in core.step().items():
            outputs.setdefault(client_index, []).extend(write_out(client_outputs))
    return outputs


def test_outputs_go_to_the_client_that_asked():
    core, _ = make_core()
    core.add_request(make_request("a", client_index=1, max_tokens=3))
    core.add_request(make_request("b", client_index=2, max_tokens=2))

    outputs = run(core)

    assert {index: {output.request_id for output in made} for index, made in outputs.items()} == {
        1: {"a"},
        2: {"b"},
    }
    assert outputs[1][-1].finish_reason is FinishReason.LENGTH


def test_a_refused_request_is_answered_by_the_next_step():
    core, executor = make_core(max_num_waiting=1)
    core.add_request(make_request("a"))
    core.add_request(make_request("b", client_index=3))
    core.abort_requests(["a"])

    outputs = core.step()

    assert [output.request_id for output in outputs[3].others] == ["b"]
    assert executor.num_steps == 0
    assert not core.has_work


def test_a_client_that_is_gone_takes_its_requests_along():
    core, _ = make_core()
    core.add_request(make_request("a", client_index=1))
    core.add_request(make_request("b", client_index=2, max_tokens=2))
    core.step()

    assert core.abort_client(1) == 1

    assert set(run(core)) == {2}
    assert core.stats().num_free_blocks == 63


def test_a_stop_ends_every_request_with_an_output():
    core, _ = make_core(max_num_seqs=1)
    for request_id in ("a", "b"):
        core.add_request(make_request(request_id, max_tokens=20))
    core.step()

    outputs = core.abort_all()

    assert [(output.request_id, output.finish_reason) for output in outputs[0].others] == [
        ("a", FinishReason.ABORT),
        ("b", FinishReason.ABORT),
    ]
    assert core.stats().kv_usage == 0.0
    # The step in flight comes back, and makes nothing.
    assert run(core) == {}


def test_a_request_that_is_known_stays_as_it_is():
    core, _ = make_core()
    core.add_request(make_request("a", client_index=1, max_tokens=3))
    core.add_request(make_request("a", client_index=2, max_tokens=3))

    outputs = run(core)

    assert set(outputs) == {1}
    assert [output.new_token_ids[0] for output in outputs[1]] == simulate(make_request("a", max_tokens=3))


def test_a_newer_attempt_replaces_an_older_one():
    core, _ = make_core()
    whole = simulate(make_request("a", max_tokens=6))
    core.add_request(make_request("a", max_tokens=6))
    core.step()

    core.add_request(make_request("a", max_tokens=6, attempt=1, output_token_ids=whole[:2]))

    outputs = run(core)[0]
    assert [output.new_token_ids[0] for output in outputs] == whole[2:]
    assert {output.attempt for output in outputs} == {1}


def test_the_report_says_what_the_cache_holds():
    executor = FakeExecutor()
    report = make_report(num_blocks=5, block_size=4, max_model_len=1000)

    core = EngineCore(make_engine_config(), executor, report)

    assert core.report.max_model_len == 16


def test_reports_are_numbered_and_count():
    core, _ = make_core()
    core.add_request(make_request("a", num_prompt_tokens=9, max_tokens=3))

    before = core.stats()
    run(core)
    after = core.stats()

    assert (before.sequence, before.num_waiting, before.num_prefill_tokens) == (1, 1, 9)
    assert (after.sequence, after.num_steps, after.num_output_tokens_total) == (2, 3, 3)
    assert after.num_prefill_tokens_total == 9


def test_after_a_step_that_did_not_end_nothing_is_computed_any_more():
    core, executor = make_core()
    core.add_request(make_request("a", prompt_token_ids=[POISON_STEP, 1]))
    with pytest.raises(ProcessDiedError):
        core.step()

    with pytest.raises(ProcessError, match="did not come to its end"):
        core.step()
    assert executor.num_steps == 1


class HeldStep:
    def __init__(self, output, log):
        self._output = output
        self._log = log

    def result(self):
        self._log.append(("took", self._output.step))
        return self._output


class LoggingExecutor(FakeExecutor):
    """Says when steps are submitted and awaited."""

    def __init__(self):
        super().__init__()
        self.log = []

    def submit_model(self, scheduler_output):
        self.log.append(("submitted", scheduler_output.step))
        return HeldStep(self.execute_model(scheduler_output), self.log)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_step_is_submitted_before_the_last_one_is_awaited(depth):
    executor = LoggingExecutor()
    core = EngineCore(make_engine_config(max_steps_in_flight=depth), executor, executor.start())
    core.add_request(make_request("a", max_tokens=3))

    outputs = run(core)[0]

    assert [output.new_token_ids[0] for output in outputs] == simulate(make_request("a", max_tokens=3))
    submitted_then_took = [event for step in (1, 2, 3) for event in (("submitted", step), ("took", step))]
    if depth == 2:
        submitted_then_took[1:5] = [("submitted", 2), ("took", 1), ("submitted", 3), ("took", 2)]
    assert executor.log == submitted_then_took


def test_an_abort_that_comes_while_the_last_step_runs_wins_over_its_end():
    core, _ = make_core()
    core.add_request(make_request("a", max_tokens=1))

    outputs = core.step(on_result=lambda: core.abort_requests(["a"]))

    assert outputs == {}
    assert core.stats().kv_usage == 0.0


def test_a_request_ends_when_its_deadline_has_passed():
    now = [0.0]
    executor = FakeExecutor()
    core = EngineCore(make_engine_config(max_num_seqs=1), executor, executor.start(), clock=lambda: now[0])
    core.add_request(make_request("a", max_tokens=50))
    core.add_request(make_request("b", max_tokens=50, deadline_at=5.0))
    core.step()

    now[0] = 5.0
    outputs = core.step()[0].others

    assert [output.finish_reason for output in outputs if output.request_id == "b"] == [FinishReason.TIMEOUT]
    assert core.num_unfinished_requests == 1


def test_a_reset_of_the_prefix_cache_tells_the_truth():
    core, _ = make_core()
    core.add_request(make_request("a", num_prompt_tokens=9, max_tokens=3))
    core.step()

    assert not core.reset_prefix_cache()
    run(core)
    assert core.reset_prefix_cache()

    core.add_request(make_request("a", num_prompt_tokens=9, max_tokens=1))
    assert run(core)[0][0].num_cached_tokens == 0


def test_an_idle_core_with_a_grammar_under_way_does_not_spin_and_is_rung():
    class SlowCompiler:
        def __init__(self):
            self.release = threading.Event()

        def compile(self, spec):
            assert self.release.wait(10)
            raise GrammarError("no such form")

    compiler, rung = SlowCompiler(), threading.Event()
    executor = FakeExecutor()
    core = EngineCore(
        make_engine_config(), executor, executor.start(), compiler=compiler, on_grammar=rung.set
    )
    core.add_request(make_request("a", structured_outputs=StructuredOutputs(regex="x")))
    core.add_request(make_request("b", max_tokens=2))
    outputs = run(core)
    assert {output.request_id for output in outputs[0]} == {"b"}
    assert not core.has_work

    compiler.release.set()
    assert rung.wait(10)
    core.take_grammars()

    (refused,) = run(core)[0]
    assert refused.request_id == "a"
    assert refused.is_invalid
    assert refused.error == "no such form"
    assert core.num_unfinished_requests == 0
    core.close(reason="done")


def test_a_grammar_that_is_not_compiled_in_time_ends_its_request():
    class StuckCompiler:
        def __init__(self):
            self.began, self.release = threading.Event(), threading.Event()

        def compile(self, spec):
            self.began.set()
            assert self.release.wait(20)
            return spec

    compiler, now = StuckCompiler(), [100.0]
    executor = FakeExecutor()
    core = EngineCore(
        make_engine_config(grammar_compile_timeout_s=3),
        executor,
        executor.start(),
        compiler=compiler,
        clock=lambda: now[0],
    )
    core.add_request(make_request("a", structured_outputs=StructuredOutputs(regex="x")))
    assert compiler.began.wait(10)
    assert core.next_deadline_at == 103.0
    assert not core.has_work
    now[0] = 103.0
    assert core.has_work

    (refused,) = run(core)[0]

    assert refused.is_invalid
    assert "structured_outputs" in refused.error
    assert core.num_unfinished_requests == 0
    compiler.release.set()
    core.close(reason="done")


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_the_grammar_of_a_request_that_ended_in_line_is_not_compiled(how):
    class OneByOneCompiler:
        def __init__(self):
            self.began, self.release, self.compiled = threading.Semaphore(0), threading.Event(), []

        def compile(self, spec):
            self.compiled.append(spec.regex)
            self.began.release()
            assert self.release.wait(20)
            raise GrammarError("no")

    def with_grammar(name, **kwargs):
        return make_request(name, structured_outputs=StructuredOutputs(regex=name), **kwargs)

    compiler, now = OneByOneCompiler(), [100.0]
    executor = FakeExecutor()
    core = EngineCore(
        make_engine_config(), executor, executor.start(), compiler=compiler, clock=lambda: now[0]
    )
    busy = [f"busy{number}" for number in range(NUM_THREADS)]
    for name in busy:
        core.add_request(with_grammar(name))
        assert compiler.began.acquire(timeout=10)
    core.add_request(msgspec.structs.replace(with_grammar("left"), deadline_at=101.0))
    core.add_request(with_grammar("last"))

    if how == "abort":
        core.abort_requests(["left"])
    else:
        now[0] = 101.0
        assert [output.finish_reason for output in core.step()[0].others] == [FinishReason.TIMEOUT]
    compiler.release.set()
    while core.num_unfinished_requests:
        core.take_grammars(10.0)

    assert sorted(compiler.compiled) == sorted([*busy, "last"])
    core.close(reason="done")


def test_a_paused_engine_core_keeps_its_requests_and_goes_on_where_it_was():
    core, executor = make_core()
    request = make_request("a", max_tokens=20)
    core.add_request(request)
    core.step()

    carry_out(core, CoreControl(call_id=1, kind=ControlKind.PAUSE, timeout_s=1.0))
    made = run(core)
    num_steps = executor.num_steps
    core.add_request(make_request("b", max_tokens=2))
    assert not core.has_work
    assert core.num_unfinished_requests == 2
    assert executor.num_steps == num_steps

    carry_out(core, CoreControl(call_id=2, kind=ControlKind.RESUME, timeout_s=1.0))
    rest = run(core)[0]
    tokens = [
        token
        for output in [*made.get(0, []), *rest]
        if output.request_id == "a"
        for token in output.new_token_ids
    ]
    assert tokens[-1] == simulate(request)[-1]
    assert executor.num_steps > num_steps


def test_a_sleep_ends_what_is_left_and_runs_on_every_rank():
    core, executor = make_core()
    core.add_request(make_request("a", max_tokens=20))
    core.step()

    done, outputs = carry_out(
        core, CoreControl(call_id=5, kind=ControlKind.SLEEP, level=SleepLevel.DROP, timeout_s=1.0)
    )

    assert done == CoreControlDone(call_id=5)
    assert [output.finish_reason for output in outputs[0].others] == [FinishReason.ABORT]
    assert executor.hooks == [("sleep", SleepLevel.DROP)]
    assert not core.has_work
    assert core.stats().num_free_blocks == 63


def test_a_request_that_comes_in_a_sleep_waits_for_its_end():
    """It may have been on its way when the replica was drained. Ranks that are awake in part are asleep."""
    core, executor = make_core()
    request = make_request("a", max_tokens=3)
    carry_out(core, CoreControl(call_id=1, kind=ControlKind.SLEEP, timeout_s=1.0))

    core.add_request(request)
    assert not core.has_work
    assert core.step() == {}
    executor.hook_error = "no room"
    carry_out(core, CoreControl(call_id=2, kind=ControlKind.WAKE, timeout_s=1.0))
    assert not core.has_work
    assert executor.num_steps == 0

    executor.hook_error = None
    carry_out(core, CoreControl(call_id=3, kind=ControlKind.WAKE, timeout_s=1.0))
    tokens = [token for output in run(core)[0] for token in output.new_token_ids]
    assert tokens == simulate(request)


def test_what_goes_wrong_on_a_rank_is_the_answer():
    core, executor = make_core()
    executor.hook_error = "no room"

    done, _ = carry_out(core, CoreControl(call_id=6, kind=ControlKind.WAKE, timeout_s=1.0))

    assert done == CoreControlDone(call_id=6, error="tp0: no room")


def test_prefixes_that_requests_hold_are_not_forgotten():
    core, _ = make_core()
    core.add_request(make_request("a", num_prompt_tokens=9, max_tokens=20))
    core.step()
    reset = CoreControl(call_id=7, kind=ControlKind.RESET_PREFIX_CACHE, timeout_s=1.0)

    done, _ = carry_out(core, reset)
    assert done.error is not None
    run(core)
    done, _ = carry_out(core, reset)
    assert done.error is None
