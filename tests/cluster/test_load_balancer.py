"""The least-loaded balancer."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.errors import NoReplicaError
from phalanx.cluster.load_balancer import LeastLoadedBalancer
from support.cluster import make_stats


def test_no_ready_replica_is_an_error_that_says_when_to_come_back() -> None:
    with pytest.raises(NoReplicaError) as caught:
        LeastLoadedBalancer().choose([], {}, {})
    assert caught.value.retry_after_s > 0


def test_a_burst_spreads_evenly_before_any_snapshot_arrives() -> None:
    balancer, inflight = LeastLoadedBalancer(), Counter[int]()

    for _ in range(12):
        inflight[balancer.choose([0, 1, 2], inflight, {})] += 1

    assert inflight == {0: 4, 1: 4, 2: 4}


def test_equal_replicas_take_turns() -> None:
    balancer = LeastLoadedBalancer()

    assert [balancer.choose([0, 1], {}, {}) for _ in range(4)] == [0, 1, 0, 1]


def test_load_that_only_others_have_caused_counts() -> None:
    stats = {0: make_stats(0, num_running=9), 1: make_stats(1, num_waiting=2)}

    assert LeastLoadedBalancer().choose([0, 1], {}, stats) == 1


def test_own_requests_count_although_the_snapshot_is_older() -> None:
    stats = {0: make_stats(0), 1: make_stats(1, num_running=1)}

    assert LeastLoadedBalancer().choose([0, 1], {0: 5}, stats) == 1


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
    st.dictionaries(st.integers(0, 7), st.integers(0, 50)),
    st.dictionaries(st.integers(0, 7), st.integers(0, 50)),
)
def test_the_choice_is_ready_and_no_other_has_less(
    ready: list[int], inflight: dict[int, int], running: dict[int, int]
) -> None:
    stats = {rank: make_stats(rank, num_running=count) for rank, count in running.items()}

    choice = LeastLoadedBalancer().choose(ready, inflight, stats)

    load = {rank: max(inflight.get(rank, 0), running.get(rank, 0)) for rank in ready}
    assert load[choice] == min(load.values())
