"""Pacing: the longest begin first, prompts fill steps as long as nobody's end is put off, else they come at once."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.engine.pacing import longest_first
from phalanx.engine.scheduler import Scheduler
from phalanx.workers.messages import ModelRunnerOutput, SchedulerOutput
from phalanx.workers.sampling_params import SamplingParams
from support.engine import make_request, make_scheduler

STEP_TOKENS, MOST, SEATS = 96, 600, 12
LENGTHS = st.lists(st.tuples(st.integers(1, 150), st.integers(1, 80)), min_size=1, max_size=SEATS)


def run_step(scheduler: Scheduler) -> tuple[SchedulerOutput, int, int]:
    """One step, of which every sample is the same token. Returns it, how many sample, and its tokens of prompts."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    _, sampling, num_prefill_tokens = scheduler._in_flight[-1]
    output = ModelRunnerOutput(
        step=scheduled.step,
        request_ids=[request.request_id for request in sampling],
        sampled_token_ids=[1] * len(sampling),
    )
    scheduler.update_from_output(scheduled, output)
    return scheduled, len(sampling), num_prefill_tokens


def steps_of(
    lengths: list[tuple[int, int]], *, paced: int | None = STEP_TOKENS, seats: int = SEATS, **params: object
) -> list[tuple[int, int]]:
    """Run requests of (prompt, output) tokens to their ends. Returns each step's tokens, and those of prompts."""
    scheduler, _ = make_scheduler(
        num_blocks=4096, max_num_seqs=seats, max_num_batched_tokens=MOST, enable_prefix_caching=False,
        **({} if paced is None else {"paced_step_tokens": paced}),
    )  # fmt: skip
    requests = [
        make_request(
            f"r{number}", num_prompt_tokens=prompt, **{"max_tokens": most, "ignore_eos": True, **params}
        )
        for number, (prompt, most) in enumerate(lengths)
    ]
    for request in sorted(requests, key=lambda request: longest_first(request.sampling_params)):
        assert scheduler.add_request(request) is None
    steps, num_outputs = [], 0
    while scheduler.num_unfinished_requests:
        scheduled, num_sampling, num_prefill_tokens = run_step(scheduler)
        steps.append((scheduled.total_num_scheduled_tokens, num_prefill_tokens))
        num_outputs += num_sampling
        scheduler.check_invariants()
    assert num_outputs == sum(most for _, most in lengths)
    return steps


@settings(deadline=None, max_examples=40)
@given(LENGTHS)
@example([(1, 1)])
@example([(150, 80)] * SEATS)
@example([(150, 2)] + [(150, 1)] * 11)
def test_nobody_ends_later_than_the_longest_and_few_steps_are_large(lengths: list[tuple[int, int]]) -> None:
    paced, unpaced = steps_of(lengths), steps_of(lengths, paced=None)

    assert len(paced) <= len(unpaced) + 1
    assert sum(tokens for tokens, _ in paced) == sum(tokens for tokens, _ in unpaced)
    assert max(tokens for tokens, _ in paced) <= MOST


def test_prompts_fill_the_steps_of_those_who_decode() -> None:
    # The second may wait for 40 steps, and so on: far more than their prompts take at this rate.
    lengths = [(96, 400 - 40 * number) for number in range(10)]

    steps = steps_of(lengths)

    assert [tokens for tokens, of_prompts in steps if of_prompts][:-1] == [STEP_TOKENS] * 10
    assert len(steps) == 400


def test_a_step_takes_more_when_slack_would_run_out() -> None:
    # All but the first have to be there within five steps.
    steps = steps_of([(96, 50)] + [(150, 46)] * 8)

    assert len(steps) == 50
    assert [of_prompts > 0 for _, of_prompts in steps[:6]] == [True] * 5 + [False]
    assert max(tokens for tokens, _ in steps) < 350


@settings(deadline=None, max_examples=15)
@given(LENGTHS)
def test_requests_of_one_length_or_of_none_come_as_fast_as_they_can(lengths: list[tuple[int, int]]) -> None:
    of_one_length = [(prompt, 60) for prompt, _ in lengths]

    assert steps_of(of_one_length) == steps_of(of_one_length, paced=None)
    assert steps_of(lengths, ignore_eos=False) == steps_of(lengths, paced=None, ignore_eos=False)


def test_everyone_who_runs_gets_a_token_however_many_prompts_have_begun() -> None:
    scheduler, _ = make_scheduler(
        num_blocks=40_000, max_num_seqs=101, max_num_batched_tokens=10_000, long_prefill_share=0.01,
        paced_step_tokens=64, max_model_len=30_000, enable_prefix_caching=False,
    )  # fmt: skip
    scheduler.add_request(make_request("long", num_prompt_tokens=5, max_tokens=20_000, ignore_eos=True))
    run_step(scheduler)
    for number in range(101):
        scheduler.add_request(
            make_request(f"r{number}", num_prompt_tokens=1000, max_tokens=9, ignore_eos=True)
        )
    # One more than there are seats: as many as can begin at once. Without it all may wait for the longest.
    assert len(run_step(scheduler)[0].num_scheduled_tokens) == 101
    scheduler.abort_requests(["r100"])

    for _ in range(5):
        scheduled, _, _ = run_step(scheduler)
        assert len(scheduled.num_scheduled_tokens) == 101
        assert min(scheduled.num_scheduled_tokens.values()) == 1


def test_more_requests_than_seats_come_as_fast_as_they_can() -> None:
    lengths = [(50 + number, 90 - 7 * number) for number in range(10)]

    assert steps_of(lengths, seats=3) == steps_of(lengths, paced=None, seats=3)


def test_who_may_end_early_begins_before_the_longest() -> None:
    early, short, long, least = (
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=5, ignore_eos=True),
        SamplingParams(max_tokens=7, ignore_eos=True),
        SamplingParams(max_tokens=8, min_tokens=8),
    )
    stops = SamplingParams(max_tokens=5, ignore_eos=True, stop_token_ids=(4,))

    assert [params.known_output_len for params in (early, short, long, least, stops)] == [None, 5, 7, 8, None]
    assert sorted([short, early, least, long, stops], key=longest_first) == [early, stops, least, long, short]
