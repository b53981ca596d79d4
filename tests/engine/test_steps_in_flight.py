"""Steps in flight: placeholders, late stops, and every token exactly once, against each request running alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.messages import FinishReason
from phalanx.workers.sampling_params import StructuredOutputs
from support.engine import (
    VOCAB_SIZE,
    FakeModelRunner,
    Pipeline,
    collect_tokens,
    make_request,
    make_scheduler,
    run_to_end,
    simulate,
)


def test_a_step_is_planned_while_the_one_before_it_is_in_flight():
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request("a", num_prompt_tokens=5, max_tokens=9))

    first, second = scheduler.schedule(), scheduler.schedule()

    assert first is not None
    assert second is not None
    assert second.num_scheduled_tokens == {"a": 1}
    assert second.num_computed_tokens == [5]


def test_counters_are_those_of_the_steps_that_are_back():
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request("a", num_prompt_tokens=5, max_tokens=9))
    runner = FakeModelRunner()

    first, second = scheduler.schedule(), scheduler.schedule()

    def counted():
        stats = scheduler.stats()
        return (
            stats.num_steps,
            stats.num_prefill_tokens_total,
            stats.num_output_tokens_total,
            stats.num_context_tokens_total,
        )

    assert counted() == (0, 0, 0, 0)
    scheduler.update_from_output(first, runner.execute(first))
    assert counted() == (1, 5, 1, 0)
    scheduler.update_from_output(second, runner.execute(second))
    assert counted() == (2, 5, 2, 5)


def test_nothing_is_scheduled_past_the_last_token_of_a_request():
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request("a", max_tokens=3))
    runner = FakeModelRunner()

    outputs = run_to_end(scheduler, runner, depth=2)

    assert collect_tokens(outputs)["a"] == simulate(make_request("a", max_tokens=3))
    assert scheduler.stats().num_steps == 3


def test_nothing_is_scheduled_past_the_context():
    scheduler, _ = make_scheduler(max_model_len=9)
    scheduler.add_request(make_request("a", num_prompt_tokens=5, max_tokens=None))

    outputs = run_to_end(scheduler, FakeModelRunner(), depth=2)

    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(outputs) == scheduler.stats().num_steps == 4


def test_what_a_step_in_flight_samples_after_the_end_is_dropped():
    expected = simulate(make_request("a", max_tokens=9))
    scheduler, kv = make_scheduler()
    scheduler.add_request(make_request("a", max_tokens=9, eos_token_ids=(expected[2],)))

    outputs = run_to_end(scheduler, FakeModelRunner(), depth=2)

    assert collect_tokens(outputs)["a"] == expected[:3]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert scheduler.stats().num_steps == 4
    assert scheduler.stats().num_output_tokens_total == 3
    assert kv.usage == 0.0


def test_an_abort_with_two_steps_in_flight_frees_the_blocks_and_ignores_what_comes():
    scheduler, kv = make_scheduler()
    scheduler.add_request(make_request("a", max_tokens=9))
    pipeline = Pipeline(scheduler, FakeModelRunner(), depth=2)
    pipeline.submit()

    scheduler.abort_requests(["a"])

    assert kv.usage == 0.0
    assert [pipeline.take(), pipeline.take()] == [[], []]
    assert scheduler.schedule() is None


def test_a_newer_attempt_takes_no_token_of_a_step_that_computed_the_older_one():
    whole = simulate(make_request("a", max_tokens=8))
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request("a", max_tokens=8))
    pipeline = Pipeline(scheduler, FakeModelRunner(), depth=2)
    pipeline.submit()

    # The new attempt is scheduled, under the same id, before the result of the old one is in.
    scheduler.add_request(make_request("a", max_tokens=8, attempt=1, output_token_ids=whole[:3]))
    assert pipeline.take() == []
    outputs = []
    while True:
        pipeline.submit()
        if not pipeline.in_flight:
            break
        outputs += pipeline.take()

    assert collect_tokens(outputs)["a"] == whole[3:]
    assert {output.attempt for output in outputs} == {1}


def test_a_preempted_request_waits_for_its_token_in_flight_and_gets_it_once():
    requests = [make_request(name, prompt_token_ids=[i] * 4, max_tokens=9) for i, name in enumerate("ab")]
    scheduler, _ = make_scheduler(num_blocks=8, block_size=2, max_num_seqs=2)
    for request in requests:
        scheduler.add_request(request)
    pipeline = Pipeline(scheduler, FakeModelRunner(block_size=2), depth=2)
    outputs = []
    pipeline.submit()
    while not scheduler.stats().num_preemptions:
        outputs += pipeline.take()
        pipeline.submit()
    victim = scheduler.get_request("b")

    assert victim is not None
    assert victim.num_placeholders == 1
    while pipeline.in_flight:
        outputs += pipeline.take()
        pipeline.submit()

    tokens = collect_tokens(outputs)
    assert tokens == {request.request_id: simulate(request) for request in requests}


def test_blocks_of_a_request_that_ended_are_given_to_others_while_its_last_step_is_in_flight():
    first = simulate(make_request("a", max_tokens=9))
    requests = [
        make_request("a", max_tokens=9, eos_token_ids=(first[0],)),
        make_request("b", prompt_token_ids=[3] * 5, max_tokens=7),
    ]
    scheduler, _ = make_scheduler(num_blocks=4, block_size=4, max_num_seqs=2)
    for request in requests:
        scheduler.add_request(request)

    tokens = collect_tokens(run_to_end(scheduler, FakeModelRunner(), depth=2))

    assert tokens == {"a": first[:1], "b": simulate(requests[1])}


def test_a_reset_with_a_step_in_flight_leaves_nothing_that_can_be_hit():
    """What the step writes late belongs to nobody, and a prompt that would have hit it is computed."""
    scheduler, kv = make_scheduler(block_size=4)
    prompt = list(range(13))
    pipeline = Pipeline(scheduler, FakeModelRunner(), depth=2)
    scheduler.add_request(make_request("a", prompt_token_ids=prompt, max_tokens=9))
    pipeline.submit()

    assert not scheduler.reset_prefix_cache()
    scheduler.abort_requests(["a"])
    assert scheduler.reset_prefix_cache()
    again = make_request("b", prompt_token_ids=prompt, max_tokens=5)
    scheduler.add_request(again)
    outputs = [*pipeline.take(), *pipeline.take()]
    while scheduler.num_unfinished_requests:
        pipeline.submit()
        outputs += pipeline.take()

    assert collect_tokens(outputs) == {"b": simulate(again)}
    assert outputs[0].num_cached_tokens == 0
    assert kv.usage == 0.0


@pytest.mark.parametrize("depth", [1, 2])
def test_full_blocks_of_an_output_are_published_when_it_ends(depth):
    scheduler, _ = make_scheduler(block_size=4)
    request = make_request("a", num_prompt_tokens=4, max_tokens=9)
    scheduler.add_request(request)
    run_to_end(scheduler, runner := FakeModelRunner(), depth=depth)

    scheduler.add_request(
        make_request("b", prompt_token_ids=[*request.prompt_token_ids, *simulate(request)], max_tokens=1)
    )
    outputs = run_to_end(scheduler, runner, depth=depth)

    # All but the very last token were computed, and that is 12 of them.
    assert outputs[0].num_cached_tokens == 12


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt length
        st.integers(0, 3),  # which of four common prefixes
        st.integers(1, 14),  # max_tokens
        st.integers(0, 12),  # arrives before step
        st.one_of(st.none(), st.integers(0, 30)),  # aborted before step
        st.integers(0, 2),  # priority
        st.sampled_from([None, "", "x"]),  # salt; "" stands for a group of siblings
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=300, deadline=None)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(10, 30),
    block_size=st.sampled_from([1, 2, 4, 8]),
    max_num_seqs=st.integers(1, 6),
    chunk=st.integers(6, 40),
    share=st.sampled_from([0.1, 0.5, 1.0]),
    max_overtakes=st.integers(0, 3),
    enable_prefix_caching=st.booleans(),
    depth=st.sampled_from([1, 2]),
    abort_in_flight=st.booleans(),
    windows=st.sampled_from([(None,), (None,), (5,), (None, 3), (None, 6, 6), (9, 2)]),
)
def test_any_stream_of_requests_gives_what_each_gives_alone(
    requests,
    num_blocks,
    block_size,
    max_num_seqs,
    chunk,
    share,
    max_overtakes,
    enable_prefix_caching,
    depth,
    abort_in_flight,
    windows,
):
    num_blocks *= len(windows)
    scheduler, kv = make_scheduler(
        num_blocks=num_blocks,
        windows=windows,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        long_prefill_share=share,
        max_overtakes=max_overtakes,
        check_worker_rows=True,
    )
    runner = FakeModelRunner(block_size=block_size, vocab_size=5, windows=windows)
    pipeline = Pipeline(scheduler, runner, depth=depth)
    expected, arrivals, aborts = {}, {}, {}
    refused = set()
    for index, (length, prefix, max_tokens, arrives, aborted, priority, salt) in enumerate(requests):
        request = make_request(
            f"r{index}",
            prompt_token_ids=[prefix] * (length // 2) + [index % 5] * (length - length // 2),
            max_tokens=max_tokens,
            eos_token_ids=(4,),
            priority=priority,
            cache_salt=salt or None,
            group_id="siblings" if salt == "" else None,
        )
        expected[request.request_id] = simulate(request, max_model_len=scheduler.max_model_len, vocab_size=5)
        arrivals.setdefault(arrives, []).append(request)
        if aborted is not None:
            aborts.setdefault(aborted, []).append(request.request_id)
    tokens, finished, aborted_ids = {}, set(), set()

    def abort(step):
        for request_id in aborts.pop(step, []):
            if request_id not in finished and scheduler.get_request(request_id) is not None:
                aborted_ids.add(request_id)
            scheduler.abort_requests([request_id])
            scheduler.check_invariants()

    for step in range(2000):
        for request in arrivals.pop(step, []):
            if scheduler.add_request(request) is not None:
                refused.add(request.request_id)
        if not abort_in_flight:
            abort(step)
        pipeline.submit()
        if abort_in_flight:
            abort(step)
        if not pipeline.in_flight:
            if not arrivals:
                break
            continue
        for output in pipeline.take():
            assert output.request_id not in finished
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                finished.add(output.request_id)

    for scheduled in pipeline.steps:
        assert scheduled.total_num_scheduled_tokens <= chunk
        assert len(scheduled.num_scheduled_tokens) <= max_num_seqs
    for request_id, expected_tokens in expected.items():
        if request_id in refused:
            continue
        got = tokens.get(request_id, [])
        if request_id in aborted_ids:
            assert got == expected_tokens[: len(got)]
        else:
            assert got == expected_tokens
            assert request_id in finished
    assert not scheduler.num_unfinished_requests
    assert kv.num_free_blocks == num_blocks - 1
    assert kv.usage == 0.0
    assert kv.reset_prefix_cache()


class EvenOnly:
    """A grammar of even tokens that ends with its third one: `ENDS` may follow then, and nothing else."""

    ENDS = (1,)

    def __init__(self):
        self.taken = []

    problem = None

    @property
    def is_finished(self):
        return len(self.taken) >= 3

    def fill(self, words):
        words[:] = 0
        for token_id in self.ENDS if self.is_finished else range(0, VOCAB_SIZE, 2):
            words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def accept(self, token_ids):
        for token_id in token_ids:
            if token_id not in (self.ENDS if self.is_finished else range(0, VOCAB_SIZE, 2)):
                return False
            self.taken.append(token_id)
        return True


CHOICE = StructuredOutputs(choice=("stands for a grammar",))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_with_a_grammar_steps_aside_until_it_is_ready(depth):
    scheduler, kv = make_scheduler()
    scheduler.add_request(
        make_request("a", structured_outputs=CHOICE, eos_token_ids=(1,), max_tokens=9, min_tokens=8)
    )
    scheduler.add_request(make_request("b", max_tokens=2))
    runner = FakeModelRunner()
    outputs = run_to_end(scheduler, runner, depth=depth)
    assert collect_tokens(outputs).keys() == {"b"}
    assert scheduler.num_open_requests == 0

    assert scheduler.set_matcher("a", matcher := EvenOnly()) is None
    outputs = run_to_end(scheduler, runner, depth=depth)

    tokens = collect_tokens(outputs)["a"]
    assert tokens == matcher.taken
    assert [token_id % 2 for token_id in tokens] == [0, 0, 0, 1]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert kv.usage == 0.0


def test_the_step_of_a_grammar_is_submitted_before_the_token_that_its_mask_needs():
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request("a", structured_outputs=CHOICE, eos_token_ids=(1,), max_tokens=9))
    scheduler.set_matcher("a", matcher := EvenOnly())
    pipeline = Pipeline(scheduler, FakeModelRunner(), depth=2)

    pipeline.submit()

    assert [scheduled.needs_masks for scheduled, _ in pipeline.in_flight] == [True, True]
    assert pipeline.in_flight[0][1] is not None, "nothing is awaited for the first mask"
    assert pipeline.in_flight[1][1] is None
    [output] = pipeline.take()
    assert matcher.taken == output.new_token_ids
    assert pipeline.in_flight[0][1] is not None


def test_a_step_whose_constrained_requests_have_all_ended_gets_its_empty_masks():
    scheduler, kv = make_scheduler()
    scheduler.add_request(make_request("a", structured_outputs=CHOICE, eos_token_ids=(1,), max_tokens=9))
    scheduler.set_matcher("a", EvenOnly())
    pipeline = Pipeline(scheduler, FakeModelRunner(), depth=2)
    pipeline.submit()

    scheduler.abort_requests(["a"])
    pipeline.take()

    assert scheduler.fill_grammar_masks().request_ids == []
    assert pipeline.take() == []
    assert kv.usage == 0.0


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7), st.booleans()), min_size=1, max_size=6),
    num_blocks=st.integers(6, 12),
    chunk=st.integers(4, 20),
)
def test_outputs_with_grammars_are_the_same_with_one_step_in_flight_and_with_two(lengths, num_blocks, chunk):
    tokens = []
    for depth in (1, 2):
        scheduler, kv = make_scheduler(num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=chunk)
        matchers = {}
        for number, (num_prompt_tokens, max_tokens, is_constrained) in enumerate(lengths):
            request_id = f"r{number}"
            scheduler.add_request(
                make_request(
                    request_id,
                    num_prompt_tokens=num_prompt_tokens,
                    max_tokens=max_tokens,
                    eos_token_ids=(1,),
                    structured_outputs=CHOICE if is_constrained else None,
                )
            )
            if is_constrained:
                matchers[request_id] = EvenOnly()
                scheduler.set_matcher(request_id, matchers[request_id])
        tokens.append(collect_tokens(run_to_end(scheduler, FakeModelRunner(), depth=depth)))
        assert kv.num_free_blocks == num_blocks - 1
        for request_id, matcher in matchers.items():
            assert tokens[-1][request_id] == matcher.taken
    assert tokens[0] == tokens[1]


def test_an_attempt_that_goes_on_has_moved_its_grammar_along():
    scheduler, _ = make_scheduler()
    scheduler.add_request(
        make_request(
            "a", structured_outputs=CHOICE, eos_token_ids=(1,), max_tokens=9, output_token_ids=[2, 4]
        )
    )
    scheduler.set_matcher("a", matcher := EvenOnly())

    outputs = run_to_end(scheduler, FakeModelRunner(), depth=2)

    assert matcher.taken[:2] == [2, 4]
    assert len(collect_tokens(outputs)["a"]) == 2


def test_a_request_is_aborted_while_its_grammar_is_compiled_and_the_grammar_is_dropped():
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request("a", structured_outputs=CHOICE))

    scheduler.abort_requests(["a"])

    assert scheduler.set_matcher("a", EvenOnly()) is None
    assert scheduler.schedule() is None
    scheduler.check_invariants()
