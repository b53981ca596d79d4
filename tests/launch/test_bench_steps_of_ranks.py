"""cluster-bench multi-gpu, step by step: what is put together of ranks and engine core, and real steps on CPU ranks."""

import pytest

from phalanx.launch.bench import multi_gpu_steps
from phalanx.launch.bench.multi_gpu_steps import StepsPlan, measure_steps
from phalanx.launch.bench.stats import summarize
from phalanx.launch.bench.step_rows import NUM_SKIPPED, host_row, host_share, sum_row
from phalanx.launch.bench.step_tables import make_tables
from phalanx.launch.bench.timed_executor import SentStep, count_tokens
from phalanx.shm.errors import ConfigError
from phalanx.workers.messages import NewRequest, SchedulerOutput
from phalanx.workers.sampling_params import SamplingParams
from phalanx.workers.step_measures import RankMeasures, StepTimes, SumTime
from support.tiny_models import TRAINED

NUM_STEPS = NUM_SKIPPED + 3


def sent(num_prompt_tokens: int = 0) -> dict[int, SentStep]:
    """Steps 1, 2, ... a millisecond apart, each submitted in 20 µs and answered after 700."""
    return {
        number: SentStep(
            step=number,
            num_decoding=4,
            num_prompt_tokens=num_prompt_tokens,
            submitted_at=number * 1e-3,
            published_at=number * 1e-3 + 20e-6,
            answered_at=number * 1e-3 + 700e-6,
        )
        for number in range(1, NUM_STEPS + 1)
    }


def rank(tp_rank: int, sums: list[SumTime], *, late_us: float = 0.0) -> RankMeasures:
    """A rank that has each step 50 µs (and `late_us`) after its submission, and is done after 600."""
    return RankMeasures(
        tp_rank=tp_rank,
        steps=[
            StepTimes(
                step=number,
                received_at=number * 1e-3 + (50.0 + late_us) * 1e-6,
                done_at=number * 1e-3 + 600e-6,
                device_us=500.0,
                idle_us=None if number == 1 else 100.0,
            )
            for number in range(1, NUM_STEPS + 1)
        ],
        sums=sums,
        gather_us=2.0 * NUM_STEPS,
        busy_us=400.0 * NUM_STEPS,
    )


def test_sums_cost_what_the_rank_that_waited_least_says() -> None:
    # In each step the ranks wait for each other by turns; half of rank 1's second sum is overlapped.
    first = [SumTime("one-shot", 10.0, 0.0), SumTime("nccl", 30.0, 0.0)] * NUM_STEPS
    second = [SumTime("one-shot", 20.0, 0.0), SumTime("nccl", 20.0, 10.0)] * NUM_STEPS

    row = sum_row(
        [rank(0, first), rank(1, second)],
        sent(),
        num_requests=4,
        kind="decode",
        has_prompts=False,
        num_layers=2,
    )

    assert (row.width, row.num_steps, row.num_sums, row.num_tokens) == (2, NUM_STEPS - NUM_SKIPPED, 2, 4)
    assert (row.us, row.least_us, row.layer_us) == (40.0, 30.0, 20.0)
    assert row.overlap == 10.0 / 80.0
    assert {way: (one.num_sums, one.us, one.least_us) for way, one in row.ways.items()} == {
        "one-shot": (1.0, 15.0, 10.0),
        "nccl": (1.0, 25.0, 20.0),
    }
    assert (row.gather_us, row.busy_us, row.problem) == (2.0, 400.0, "")


@pytest.mark.parametrize(
    ("num_sums", "num_prompt_tokens", "problem"),
    [
        ((9, 10), 0, "9, 10 sums were seen in 5 steps"),
        ((9, 9), 0, "9 sums were seen in 5 steps"),
        ((0, 0), 0, "no sum was seen"),
        ((10, 10), 16, "no such step was measured"),
    ],
)
def test_what_a_profiler_lost_is_said(
    num_sums: tuple[int, int], num_prompt_tokens: int, problem: str
) -> None:
    ranks = [rank(number, [SumTime("nccl", 1.0, 0.0)] * count) for number, count in enumerate(num_sums)]

    row = sum_row(
        ranks,
        sent(num_prompt_tokens),
        num_requests=4,
        kind="decode",
        has_prompts=False,
        num_layers=2,
    )

    assert row.problem == problem
    assert make_tables([row], [])[0].rows[0][0] == f"tp 2, 4, decode: {problem}"


def test_the_executors_share_is_what_the_ranks_do_not_do() -> None:
    ranks = [rank(0, []), rank(1, [], late_us=30.0)]

    share = host_share(ranks, sent())

    assert share.num_steps == NUM_STEPS - NUM_SKIPPED
    assert share.send.p50 == pytest.approx(20.0)
    assert share.reach.p50 == pytest.approx(80.0)
    assert share.reply.p50 == pytest.approx(100.0)
    assert share.overhead.p50 == pytest.approx(150.0)
    assert share.step.p50 == pytest.approx(1000.0)


def test_hidden_is_what_is_gone_with_more_steps_in_flight() -> None:
    ranks = [rank(0, []), rank(1, [])]
    alone = host_share(ranks, sent())
    in_flight = sent()
    for number, step in in_flight.items():
        step.answered_at = number * 600e-6
    # The last one was not asked for before the measurement ended.
    in_flight[NUM_STEPS].answered_at = 0.0

    row = host_row(alone, ranks, in_flight, num_requests=4, encode=summarize([3.0]), decode=summarize([5.0]))

    assert row.step_us.count == NUM_STEPS - NUM_SKIPPED - 2
    assert row.step_us.p50 == pytest.approx(600.0)
    assert (row.device_us.p50, row.idle_us.p50) == (500.0, 100.0)
    # 500 µs beside the device when each is waited for, 100 with more in flight.
    assert row.hidden == pytest.approx(0.8)


def test_tokens_of_prompts_are_told_from_those_of_outputs() -> None:
    new = NewRequest(
        request_id="new",
        token_ids=[1],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=[1],
        sampling_params=SamplingParams(),
        seed=0,
    )
    scheduled = SchedulerOutput(
        step=1,
        new_requests=[new],
        num_scheduled_tokens={"old": 1, "chunk": 8, "new": 1},
        num_computed_tokens=[9, 8, 0],
        removed_request_ids=[],
    )

    assert count_tokens(scheduled) == (1, 9)


@pytest.mark.parametrize("width", [2, *(pytest.param(width, marks=pytest.mark.full) for width in (1, 3))])
def test_real_steps_on_cpu_ranks(width: int) -> None:
    plan = StepsPlan(requests=(1, 3), prompt_len=8, num_steps=5, num_recorded=4)

    measures = measure_steps(str(TRAINED), width, plan, device="cpu", has_dummy_weights=False)

    assert [row.problem for row in measures.sums] == [""] * 6
    # Two in each of the two layers, and one of the embedding.
    assert {row.num_sums for row in measures.sums} == {0 if width == 1 else 5}
    assert [row.num_tokens for row in measures.sums] == [1, 9, 513, 3, 11, 515]
    assert all(row.num_steps >= plan.num_recorded - 1 and row.busy_us > 0 for row in measures.sums)
    if width > 1:
        assert all(0 < row.least_us <= row.us for row in measures.sums)
        assert all(list(row.ways) == ["shm"] and row.gather_us > 0 for row in measures.sums)
    for row in measures.host:
        assert row.alone.num_steps == plan.num_steps
        assert 0 < row.alone.send.min <= row.alone.reach.max
        assert min(row.alone.overhead.min, row.alone.reply.min, row.encode.min, row.decode.min) > 0
        assert row.alone.step.min > row.alone.overhead.min
        assert min(row.step_us.min, row.device_us.min, row.idle_us.min) > 0
    assert [len(table.rows) for table in make_tables(measures.sums, measures.host)] == [6, 2, 2]


def test_too_many_steps_for_the_model_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--input-len: needs \d+ tokens of context, and the model has 2048"
    ):
        measure_steps(
            str(TRAINED), 1, StepsPlan(requests=(1,), prompt_len=2000), device="cpu", has_dummy_weights=False
        )


def test_ranks_that_cannot_record_leave_the_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    # An argument that the hook does not understand fails on every rank, as a profiler does that must not be used.
    plan = StepsPlan(requests=(1,), prompt_len=8, num_steps=3, num_recorded=3)
    real = multi_gpu_steps.MeasurePlan

    def refuse_sums(*, max_steps: int, with_sums: bool) -> object:
        return "no plan" if with_sums else real(max_steps=max_steps, with_sums=with_sums)

    monkeypatch.setattr(multi_gpu_steps, "MeasurePlan", refuse_sums)

    measures = measure_steps(str(TRAINED), 1, plan, device="cpu", has_dummy_weights=False)

    assert len(measures.host) == 1
    assert [row.num_sums for row in measures.sums] == [0, 0, 0]
    assert all("rank 0 does not measure its steps" in row.problem for row in measures.sums)
