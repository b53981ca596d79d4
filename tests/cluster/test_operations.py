"""Operations as stages and outcomes; no process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.operations import Do, Operation, Outcome, Stage, StageKind, Target

DRAIN = Stage(kind=StageKind.SET_MODE)
RESTART = Stage(kind=StageKind.RESTART)
REMOVE = Stage(kind=StageKind.REMOVE)


def make(num_targets: int = 2, *, way_back: tuple[Stage, ...] = (), **options: bool) -> Operation:
    targets = [
        Target(dp_rank=rank, stages=(DRAIN, RESTART), way_back=way_back) for rank in range(num_targets)
    ]
    return Operation(targets, started_at=0.0, timeout_s=10.0, **options)


def test_all_at_once() -> None:
    operation = make()

    assert operation.begin() == [Do(dp_rank=0, stage=DRAIN), Do(dp_rank=1, stage=DRAIN)]
    assert operation.done(1) == [Do(dp_rank=1, stage=RESTART)]
    assert operation.done(0) == [Do(dp_rank=0, stage=RESTART)]
    assert operation.done(0) == []
    assert not operation.is_over
    assert operation.done(1) == []
    assert operation.is_over
    assert operation.outcomes() == [Outcome(dp_rank=0, problem=None), Outcome(dp_rank=1, problem=None)]


def test_one_after_the_other() -> None:
    operation = make(is_rolling=True)

    assert operation.begin() == [Do(dp_rank=0, stage=DRAIN)]
    assert operation.done(0) == [Do(dp_rank=0, stage=RESTART)]
    assert operation.done(0) == [Do(dp_rank=1, stage=DRAIN)]
    operation.done(1)
    operation.done(1)
    assert operation.is_over


def test_a_rolling_operation_ends_with_the_first_failure_after_its_way_back() -> None:
    operation = make(3, is_rolling=True, way_back=(REMOVE,))
    operation.begin()
    operation.done(0)

    assert operation.failed(0, "no room") == [Do(dp_rank=0, stage=REMOVE)]
    assert not operation.is_over
    assert operation.done(0) == []
    assert operation.is_over
    assert [outcome.problem for outcome in operation.outcomes()] == [
        "no room",
        "not tried: dp0 failed",
        "not tried: dp0 failed",
    ]


def test_a_failure_takes_all_back_where_the_cluster_must_not_stay_half_way() -> None:
    operation = make(3, goes_all_back=True, way_back=(REMOVE,))
    operation.begin()
    operation.done(0)
    operation.done(0)  # this one has come to its end

    assert {do.dp_rank for do in operation.failed(1, "no room")} == {0, 1, 2}
    for rank in (0, 1, 2):
        assert operation.running[rank] is REMOVE
        operation.done(rank)
    assert operation.is_over
    assert [outcome.problem for outcome in operation.outcomes()] == [
        "taken back: dp1 failed",
        "no room",
        "taken back: dp1 failed",
    ]


def test_the_deadline_fails_what_runs_and_leaves_what_is_done() -> None:
    operation = make()
    operation.begin()
    operation.done(0)
    operation.done(0)

    assert operation.tick(9.9) == []
    operation.tick(10.0)

    assert operation.is_over
    assert operation.outcomes()[0].problem is None
    assert operation.outcomes()[1].problem == "set mode: not done in time"


def test_the_way_back_has_a_deadline_of_its_own_and_says_what_went_wrong_there() -> None:
    operation = make(1, way_back=(REMOVE,))
    operation.begin()
    operation.failed(0, "no room")
    operation.tick(10.0)

    assert operation.is_over
    assert operation.outcomes()[0].problem == "no room; on the way back: remove: not done in time"


def test_nothing_to_do_is_over_at_once() -> None:
    operation = Operation([], started_at=0.0, timeout_s=1.0)
    assert operation.begin() == []
    assert operation.is_over


@pytest.mark.parametrize("is_rolling", [True, False])
@pytest.mark.parametrize("goes_all_back", [True, False])
@given(
    events=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["done", "failed", "tick"])), max_size=40)
)
def test_it_always_ends(is_rolling: bool, goes_all_back: bool, events: list[tuple[int, str]]) -> None:
    operation = make(3, is_rolling=is_rolling, goes_all_back=goes_all_back, way_back=(REMOVE, DRAIN))
    begun = operation.begin()
    now = 0.0
    for rank, event in events:
        if event == "tick":
            now += 3.0
            operation.tick(now)
        elif rank in operation.running:
            begun += operation.done(rank) if event == "done" else operation.failed(rank, "why")
    while not operation.is_over:
        now = operation.deadline_at
        operation.tick(now)

    assert operation.running == {}
    assert len(operation.outcomes()) == 3
    assert operation.tick(now + 1e9) == []
