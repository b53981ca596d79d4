"""The scheduler against a deterministic model: every output equals the request running alone."""

import gc

import pytest

from phalanx.engine.messages import FinishReason, StepOutputs
from phalanx.workers.sampling_params import StructuredOutputs
from support.engine import (
    FakeModelRunner,
    collect_tokens,
    make_request,
    make_scheduler,
    make_state,
    run_to_end,
    simulate,
)
from support.step_outputs import write_out


def test_requests_run_in_order_of_arrival_within_the_sequence_budget():
    scheduler, _ = make_scheduler(max_num_seqs=2)
    for i in range(3):
        assert scheduler.add_request(make_request(f"r{i}")) is None

    scheduled = scheduler.schedule()

    assert scheduled is not None
    assert [new.request_id for new in scheduled.new_requests] == ["r0", "r1"]
    assert scheduler.stats().num_waiting == 1


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_at_its_end():
    scheduler, _ = make_scheduler(max_num_seqs=8, max_num_batched_tokens=8)
    scheduler.add_request(make_request(num_prompt_tokens=20, max_tokens=2))
    runner = FakeModelRunner()
    counts, sampled = [], []

    while (scheduled := scheduler.schedule()) is not None:
        counts.append(scheduled.total_num_scheduled_tokens)
        output = runner.execute(scheduled)
        sampled.append(len(output.request_ids))
        scheduler.update_from_output(scheduled, output)

    assert counts == [8, 8, 4, 1]
    assert sampled == [0, 0, 1, 1]


def test_the_victim_of_a_preemption_is_the_last_admitted_and_waits_at_the_front():
    scheduler, _ = make_scheduler(num_blocks=5, block_size=4, max_num_seqs=3)
    for request_id in ("a", "b", "c"):
        scheduler.add_request(make_request(request_id, num_prompt_tokens=4, max_tokens=9))
    runner = FakeModelRunner()

    first = scheduler.schedule()
    assert first is not None
    assert [new.request_id for new in first.new_requests] == ["a", "b", "c"]
    scheduler.update_from_output(first, runner.execute(first))
    second = scheduler.schedule()

    assert second is not None
    assert second.removed_request_ids == ["c"]
    assert list(second.num_scheduled_tokens) == ["a", "b"]
    assert second.new_requests == []
    assert scheduler.stats().num_preemptions == 1
    scheduler.check_invariants()


def test_an_aborted_row_is_removed_from_the_workers_with_the_next_step_only():
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request("a"))
    scheduled = scheduler.schedule()
    assert scheduled is not None

    scheduler.abort_requests(["a", "unknown"])

    assert scheduler.schedule() is None
    scheduler.add_request(make_request("b"))
    following = scheduler.schedule()
    assert following is not None
    assert following.removed_request_ids == ["a"]


def test_a_result_for_an_aborted_request_is_ignored():
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request("a"))
    scheduled = scheduler.schedule()
    assert scheduled is not None
    result = FakeModelRunner().execute(scheduled)

    scheduler.abort_requests(["a"])

    assert scheduler.update_from_output(scheduled, result) == StepOutputs()
    assert scheduler.stats().num_free_blocks == 63


def test_a_request_that_does_not_fit_an_empty_cache_is_refused():
    scheduler, _ = make_scheduler(num_blocks=5, block_size=4)

    output = scheduler.add_request(make_request(num_prompt_tokens=16))

    assert output is not None
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert "16 tokens" in output.error
    assert output.is_invalid
    assert output.retry_after_s is None


def test_a_full_queue_says_when_to_come_back():
    scheduler, _ = make_scheduler(max_num_waiting=1)
    scheduler.add_request(make_request("a"))

    output = scheduler.add_request(make_request("b"))

    assert output is not None
    assert output.finish_reason is FinishReason.ERROR
    assert output.retry_after_s is not None
    assert scheduler.num_unfinished_requests == 1


def test_a_request_that_another_replica_has_begun_is_taken_into_a_full_queue():
    scheduler, _ = make_scheduler(max_num_waiting=1)
    scheduler.add_request(make_request("a", max_tokens=2))

    assert scheduler.add_request(make_request("b", attempt=1, output_token_ids=[5], max_tokens=4)) is None

    ended = [output.request_id for output in run_to_end(scheduler, FakeModelRunner()) if output.finish_reason]
    assert sorted(ended) == ["a", "b"]


def test_a_full_hit_of_an_aligned_prompt_still_computes_one_block():
    scheduler, _ = make_scheduler(block_size=4)
    prompt = list(range(8))
    runner = FakeModelRunner()
    scheduler.add_request(make_request("a", prompt_token_ids=prompt, max_tokens=1))
    run_to_end(scheduler, runner)

    scheduler.add_request(make_request("b", prompt_token_ids=prompt, max_tokens=1))
    scheduled = scheduler.schedule()
    assert scheduled is not None
    outputs = scheduler.update_from_output(scheduled, runner.execute(scheduled))

    assert scheduled.num_scheduled_tokens == {"b": 4}
    assert outputs.others[0].num_cached_tokens == 4


def test_a_later_request_of_one_step_shares_the_blocks_of_an_earlier_one():
    scheduler, kv = make_scheduler(block_size=4)
    prompt = list(range(9))
    for request_id in ("a", "b"):
        scheduler.add_request(make_request(request_id, prompt_token_ids=prompt, max_tokens=3))

    scheduled = scheduler.schedule()

    assert scheduled is not None
    assert scheduled.num_scheduled_tokens == {"a": 9, "b": 1}
    assert kv.get_block_ids("a")[:2] == kv.get_block_ids("b")[:2]


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens", "expected"),
    [(0, 5, (1, FinishReason.STOP)), (3, 5, (5, FinishReason.LENGTH)), (0, 1, (1, FinishReason.STOP))],
)
def test_end_tokens_win_over_length_and_min_tokens_holds_them_back(min_tokens, max_tokens, expected):
    request = make_request(max_tokens=max_tokens, min_tokens=min_tokens)
    first = simulate(request)[0]
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request(max_tokens=max_tokens, min_tokens=min_tokens, eos_token_ids=(first,)))

    outputs = run_to_end(scheduler, FakeModelRunner())

    assert (len(outputs), outputs[-1].finish_reason) == expected
    assert outputs[-1].stop_reason is None


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_the_models_end_tokens_also_where_they_are_ignored(ignore_eos):
    request = make_state(min_tokens=3, stop_token_ids=(7,), eos_token_ids=(5,), ignore_eos=ignore_eos)

    assert request.to_new_request([]).stop_token_ids == (5, 7)


def test_ignored_end_tokens_end_nothing_but_a_grammar():
    first = simulate(make_request(max_tokens=4))[0]
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request(max_tokens=4, eos_token_ids=(first,), ignore_eos=True))

    outputs = run_to_end(scheduler, FakeModelRunner())

    assert (len(outputs), outputs[-1].finish_reason) == (4, FinishReason.LENGTH)
    grammar = StructuredOutputs(choice=("a",))
    assert make_state(eos_token_ids=(5,), ignore_eos=True, structured_outputs=grammar).end_token_ids == {5}


def test_a_stop_token_of_the_client_is_named():
    token_ids = simulate(make_request(max_tokens=4))
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request(max_tokens=4, stop_token_ids=(token_ids[1],)))

    outputs = run_to_end(scheduler, FakeModelRunner())

    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == token_ids[1]


def test_a_second_attempt_goes_on_where_the_first_one_ended():
    whole = simulate(make_request(max_tokens=10))
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request(max_tokens=10, attempt=1, output_token_ids=whole[:4]))

    outputs = run_to_end(scheduler, FakeModelRunner())

    assert collect_tokens(outputs)["r0"] == whole[4:]
    assert {output.attempt for output in outputs} == {1}


def test_a_second_attempt_with_nothing_left_to_do_ends_at_once():
    whole = simulate(make_request(max_tokens=4))
    scheduler, _ = make_scheduler()

    output = scheduler.add_request(make_request(max_tokens=4, attempt=1, output_token_ids=whole))

    assert output is not None
    assert output.finish_reason is FinishReason.LENGTH
    assert not scheduler.num_unfinished_requests


def test_the_longest_request_ends_where_the_cache_ends():
    scheduler, kv = make_scheduler(num_blocks=4, block_size=4, max_model_len=1000)
    scheduler.add_request(make_request(num_prompt_tokens=5, max_tokens=None))

    outputs = run_to_end(scheduler, FakeModelRunner())

    assert scheduler.max_model_len == 12
    assert len(outputs) == 7
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert kv.usage == 0.0


def test_min_tokens_never_keeps_a_request_from_ending_at_the_context():
    scheduler, kv = make_scheduler(max_model_len=40)
    scheduler.add_request(
        make_request(num_prompt_tokens=5, max_tokens=500, min_tokens=500, eos_token_ids=(1,))
    )

    outputs = run_to_end(scheduler, FakeModelRunner(), depth=2)

    assert len(outputs) == 35
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert kv.usage == 0.0


def test_a_preempted_request_that_finds_its_own_blocks_computes_only_what_is_missing():
    request = make_request("b", num_prompt_tokens=9, max_tokens=20)
    scheduler, _ = make_scheduler(num_blocks=9, block_size=4, max_num_seqs=2)
    scheduler.add_request(make_request("a", prompt_token_ids=[3] * 9, max_tokens=15))
    scheduler.add_request(request)
    runner = FakeModelRunner()

    outputs = run_to_end(scheduler, runner, depth=2)

    assert scheduler.stats().num_preemptions > 0
    assert scheduler.stats().prefix_hit_tokens > 0
    assert collect_tokens(outputs)["b"] == simulate(request, max_model_len=scheduler.max_model_len)


def test_the_most_urgent_request_is_preempted_last_wherever_it_was_admitted():
    scheduler, _ = make_scheduler(num_blocks=10, block_size=2, max_num_seqs=3)
    runner = FakeModelRunner(block_size=2)
    requests = [
        make_request(name, prompt_token_ids=[i] * 3, max_tokens=6, priority=priority)
        for i, (name, priority) in enumerate([("late", 5), ("soon", 1), ("now", 0)])
    ]
    arriving, removed, outputs = list(requests), [], []
    while True:
        if arriving:
            scheduler.add_request(arriving.pop(0))
        if (step := scheduler.schedule()) is None:
            break
        removed += step.removed_request_ids
        outputs += write_out(scheduler.update_from_output(step, runner.execute(step)))
        scheduler.check_invariants()

    assert removed[0] == "late"
    assert scheduler.stats().num_preemptions > 0
    assert collect_tokens(outputs) == {request.request_id: simulate(request) for request in requests}
    ends = [output.request_id for output in outputs if output.finish_reason is not None]
    assert ends[-1] == "late"
    assert "now" not in removed[: removed.index("late")]


def test_siblings_wait_for_the_prompt_of_the_first_and_share_its_blocks():
    scheduler, kv = make_scheduler(num_blocks=64, block_size=4, max_num_batched_tokens=8)
    prompt = list(range(21))
    for index in range(3):
        scheduler.add_request(make_request(f"r#{index}", prompt_token_ids=prompt, max_tokens=4, group_id="r"))
    scheduler.add_request(make_request("other", prompt_token_ids=[9], max_tokens=9))
    runner = FakeModelRunner()
    steps = []
    while (step := scheduler.schedule()) is not None:
        steps.append(dict(step.num_scheduled_tokens))
        scheduler.update_from_output(step, runner.execute(step))
        if len(steps) == 5:
            assert len({tuple(kv.get_block_ids(f"r#{index}")[:5]) for index in range(3)}) == 1

    assert "other" in steps[0], "nobody waits for siblings but siblings"
    computed = sum(step.get(f"r#{index}", 0) for step in steps for index in range(3))
    assert computed == 21 + 1 + 1 + 3 * 3


def test_a_prompt_leaves_a_share_of_the_step_to_other_prompts():
    scheduler, _ = make_scheduler(max_num_batched_tokens=16, long_prefill_share=0.5)
    scheduler.add_request(make_request("long", prompt_token_ids=[1] * 40, max_tokens=2))
    scheduler.add_request(make_request("short", prompt_token_ids=[2] * 6, max_tokens=2))

    first = scheduler.schedule()

    assert first is not None
    assert first.num_scheduled_tokens == {"long": 8, "short": 6}


def test_only_what_is_more_than_a_token_is_said_of_each_request_alone():
    scheduler, _ = make_scheduler()
    scheduler.add_request(make_request("plain", max_tokens=4))
    scheduler.add_request(make_request("logprobs", max_tokens=4, logprobs=1))
    scheduler.add_request(make_request("again", max_tokens=4, attempt=1, output_token_ids=[5]))
    runner = FakeModelRunner()
    said = []
    while (step := scheduler.schedule()) is not None:
        outputs = scheduler.update_from_output(step, runner.execute(step))
        said.append((outputs.request_ids, [output.request_id for output in outputs.others]))

    assert said == [
        ([], ["plain", "logprobs", "again"]),
        (["plain"], ["logprobs", "again"]),
        (["plain"], ["logprobs", "again"]),
        ([], ["plain", "logprobs"]),
    ]
    assert scheduler.stats().num_output_tokens_total == 11


def test_a_step_in_which_all_decode_makes_no_object_for_each_request():
    num_requests = 300
    scheduler, _ = make_scheduler(
        num_blocks=500, block_size=16, max_num_seqs=num_requests, max_num_batched_tokens=2000
    )
    for index in range(num_requests):
        scheduler.add_request(make_request(f"r{index}", num_prompt_tokens=4, max_tokens=6))
    runner = FakeModelRunner(block_size=16)
    step = scheduler.schedule()
    kept, num_made = [], []
    while step is not None:
        result = runner.execute(step)
        # Nothing may be freed in between, or the difference says nothing.
        kept.append(step)
        gc.collect()
        before = gc.get_count()[0]
        outputs = scheduler.update_from_output(step, result)
        step = scheduler.schedule()
        num_made.append(gc.get_count()[0] - before)
        kept.append(outputs)

    assert len(num_made) == 6
    assert num_made[0] >= num_requests, "the first outputs say more than a token"
    assert max(num_made[1:-1]) < 30
