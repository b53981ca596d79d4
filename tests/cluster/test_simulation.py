"""Whole clusters in virtual time: whatever dies, whenever, and however messages travel, clients get what they asked.

A failure names its seed and the few events that it takes; `run_schedule(make_schedule(seed))` shows it again.
"""

import pytest

from support.simulation.bugs import BUGS, planted
from support.simulation.cluster import run_schedule, search, simulation
from support.simulation.schedule import make_schedule
from support.simulation.search_part import search_on_all_cores

SEEDS = range(2_500)
SEEDS_FOR_A_BUG = range(4_000)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(SEEDS, id="sample"),
        pytest.param(range(100_000), id="all", marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
)
def test_no_schedule_breaks_a_promise(seeds: range) -> None:
    failure, endings = search_on_all_cores(seeds)

    assert failure is None, failure
    # All that may become of a request did: none of the promises was kept by never being asked.
    assert set(endings) == {
        "done",
        "refused",
        "poisonous",
        "connection lost",
        "left",
        "expired",
        "stopped",
    }
    assert endings["done"] > sum(endings.values()) / 2


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_and_made_small(bug: str) -> None:
    with planted(bug):
        failure, _ = search(SEEDS_FOR_A_BUG)

        assert failure is not None
        assert len(failure.schedule.happenings) <= 8
        with simulation():
            assert run_schedule(failure.schedule)[0] == failure.error

    with simulation():
        assert run_schedule(failure.schedule)[0] is None, "the bug alone makes this schedule fail"


def test_the_same_seed_is_the_same_run() -> None:
    with simulation():
        assert [run_schedule(make_schedule(seed)) for seed in range(50)] == [
            run_schedule(make_schedule(seed)) for seed in range(50)
        ]
