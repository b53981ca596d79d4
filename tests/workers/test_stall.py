"""Which rank is said to hold up a call."""

import pytest

from phalanx.shm.status_board import Phase, RankStatus
from phalanx.workers.stall import describe_ranks, find_suspects


def doing(phase: Phase, call_id: int, since_at: float) -> RankStatus:
    return RankStatus(phase=phase, since_at=since_at, call_id=call_id, step=call_id)


@pytest.mark.parametrize(
    ("statuses", "culprit"),
    [
        ([doing(Phase.FORWARD, 5, 3.0), doing(Phase.FORWARD, 4, 9.0)], 1),
        ([doing(Phase.COLLECTIVE, 5, 1.0), doing(Phase.FORWARD, 5, 3.0)], 1),
        ([doing(Phase.COLLECTIVE, 5, 3.0), doing(Phase.COLLECTIVE, 5, 2.0)], 1),
        ([doing(Phase.IDLE, 5, 9.0), doing(Phase.SAMPLING, 5, 9.5)], 1),
        ([doing(Phase.IDLE, 4, 1.0), doing(Phase.COLLECTIVE, 5, 0.5)], 0),
        ([doing(Phase.IDLE, 5, 1.0), doing(Phase.IDLE, 5, 0.5)], 0),
    ],
    ids=[
        "the older call",
        "not who waits for peers",
        "the longest in a collective",
        "not who is done",
        "who has not begun",
        "nobody: the one that must answer",
    ],
)
def test_the_rank_that_is_behind_is_named(statuses: list[RankStatus], culprit: int) -> None:
    assert find_suspects(dict(enumerate(statuses)), {0}, 5)[0] == culprit


def test_a_rank_that_was_stopped_is_named_before_all_others() -> None:
    statuses = {0: doing(Phase.FORWARD, 4, 1.0), 1: doing(Phase.COLLECTIVE, 5, 2.0)}

    assert find_suspects(statuses, {0}, 5, {1}) == [1, 0]


def test_the_sentence_says_who_does_what_for_how_long() -> None:
    statuses = {0: doing(Phase.FORWARD, 5, 3.0), 1: doing(Phase.COLLECTIVE, 5, 9.0)}

    assert describe_ranks(statuses, 0, 5, 10.0, is_stopped=True) == (
        "call 5 has no answer: forward of call 5 (step 5) for 7.0 s, stopped by a signal "
        "(the others: tp1 collective of call 5 (step 5) for 1.0 s)"
    )
