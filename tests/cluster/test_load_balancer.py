"""Every policy of the balancer: what it chooses, and what it says of it."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.errors import NoReplicaError
from phalanx.cluster.load_balancer import Balancer
from phalanx.cluster.load_book import ReplicaLoad
from phalanx.cluster.prefix_policy import BOUND
from phalanx.cluster.routing import Decision, RoutingPolicy, RoutingReason, RoutingRequest, scores_text
from phalanx.cluster.step_cost import PRIOR

BUDGET = 2048


def make_balancer(policy: RoutingPolicy, *, client_index: int = 0, num_clients: int = 1) -> Balancer:
    return Balancer(policy, max_num_batched_tokens=BUDGET, client_index=client_index, num_clients=num_clients)


def choose(
    balancer: Balancer,
    loads: list[ReplicaLoad],
    *,
    prompt: int = 1000,
    cached: Mapping[int, int] | None = None,
) -> Decision:
    request = RoutingRequest(num_prompt_tokens=prompt, num_cached_tokens=cached or {})
    return balancer.choose(request, loads, PRIOR, 100.0)


def load(rank: int, requests: int = 0, **changes: float) -> ReplicaLoad:
    values: dict[str, float] = {"num_requests": requests, "reported_requests": requests, **changes}
    return ReplicaLoad(rank, is_known=True, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", RoutingPolicy)
def test_without_a_replica_there_is_an_error_that_says_when_to_come_back(policy: RoutingPolicy) -> None:
    with pytest.raises(NoReplicaError) as caught:
        choose(make_balancer(policy), [])
    assert caught.value.retry_after_s > 0


@pytest.mark.parametrize("policy", RoutingPolicy)
@given(data=st.data())
def test_the_choice_is_one_of_the_given(policy: RoutingPolicy, data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True))
    loads = [
        load(
            rank,
            data.draw(st.integers(0, 50)),
            prefill_tokens=data.draw(st.integers(0, 50_000)),
            running_tokens=data.draw(st.integers(0, 500_000)),
            headroom_tokens=data.draw(st.integers(-100_000, 500_000)),
            reported_waiting=data.draw(st.integers(0, 9)),
            kv_usage=data.draw(st.floats(0, 1)),
        )
        for rank in ranks
    ]
    cached = {rank: data.draw(st.integers(0, 999)) for rank in ranks if data.draw(st.booleans())}

    decision = choose(make_balancer(policy), loads, cached=cached)

    assert decision.dp_rank in ranks
    assert decision.num_cached_tokens == cached.get(decision.dp_rank, 0)


@pytest.mark.parametrize("policy", RoutingPolicy)
def test_one_replica_needs_no_comparison(policy: RoutingPolicy) -> None:
    assert choose(make_balancer(policy), [load(3, 9)]).reason is RoutingReason.ONLY


@pytest.mark.parametrize(
    "policy", [RoutingPolicy.ROUND_ROBIN, RoutingPolicy.LEAST_LOADED, RoutingPolicy.PREFIX_AWARE]
)
def test_equals_take_turns_and_front_ends_begin_at_different_ones(policy: RoutingPolicy) -> None:
    loads = [load(rank) for rank in range(4)]
    firsts = []
    for client_index in range(4):
        balancer = make_balancer(policy, client_index=client_index)
        chosen = [choose(balancer, loads).dp_rank for _ in range(8)]
        assert Counter(chosen) == {0: 2, 1: 2, 2: 2, 3: 2}
        firsts.append(chosen[0])
    assert firsts == [0, 1, 2, 3]


def test_least_loaded_takes_the_fewest_requests() -> None:
    decision = choose(make_balancer(RoutingPolicy.LEAST_LOADED), [load(0, 5), load(1, 2), load(2, 3)])

    assert decision.dp_rank == 1
    assert scores_text(decision.scores) == "0=5.0, 1=2.0, 2=3.0"


def test_power_of_two_never_takes_the_busiest() -> None:
    balancer = make_balancer(RoutingPolicy.POWER_OF_TWO)
    loads = [load(0, 9), load(1, 2), load(2, 1)]

    assert {choose(balancer, loads).dp_rank for _ in range(50)} == {1, 2}


@pytest.mark.parametrize(
    ("own", "reported", "waiting", "kv_usage", "score"),
    [
        (3, 5, 0, 0.9, 6.0),
        (1, 5, 0, 0.9, 5.0),
        (0, 5, 2, 0.5, 5.0),
        (0, 5, 2, 1.0, 5.0 + 6 * 2 * 0.5),
        (4, 5, 1, 0.75, 8.0 + 6 * 1 * 0.25),
    ],
)
def test_kv_aware_is_the_published_formula(
    own: int, reported: int, waiting: int, kv_usage: float, score: float
) -> None:
    balancer = make_balancer(RoutingPolicy.KV_AWARE, num_clients=2)
    one = load(0, reported, num_own=own, reported_waiting=waiting, kv_usage=kv_usage)

    assert choose(balancer, [one, load(1)]).scores[0] == pytest.approx(score)


def test_a_prefix_wins_where_it_saves_more_than_it_waits() -> None:
    balancer = make_balancer(RoutingPolicy.PREFIX_AWARE)
    loads = [load(0, 1, prefill_tokens=300), load(1, 1)]

    assert choose(balancer, loads, prompt=1000).dp_rank == 1
    decision = choose(balancer, loads, prompt=1000, cached={0: 800})
    assert (decision.dp_rank, decision.reason) == (0, RoutingReason.PREFIX)
    assert decision.num_cached_tokens == 800


@given(
    st.integers(1, 20_000),
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 20_000)), min_size=1, max_size=7),
)
def test_a_prefix_never_beats_an_idle_replica_by_more_than_it_saves(
    prompt: int, share: float, others: list[tuple[int, int]]
) -> None:
    cached = int(prompt * share)
    loads = [load(0), *(load(rank + 1, n, prefill_tokens=q) for rank, (n, q) in enumerate(others))]

    decision = choose(make_balancer(RoutingPolicy.PREFIX_AWARE), loads, prompt=prompt, cached={1: cached})

    if decision.dp_rank != 0:
        chosen = loads[decision.dp_rank]
        assert chosen.prefill_tokens <= cached
        # Its own steps are no shorter than those of an idle one.
        assert decision.scores[decision.dp_rank] <= decision.scores[0]


def test_affinity_does_not_pile_up() -> None:
    balancer = make_balancer(RoutingPolicy.PREFIX_AWARE)
    queued = Counter[int]()
    for _ in range(400):
        loads = [load(rank, 30, prefill_tokens=queued[rank]) for rank in range(4)]
        decision = choose(balancer, loads, prompt=4000, cached={0: 3000})
        queued[decision.dp_rank] += 4000 - decision.num_cached_tokens
    mean = sum(queued.values()) / 4

    # One request more than what the bound allows, which includes what it saves.
    assert max(queued.values()) <= BOUND * mean + 3000 + 4000
    assert choose(balancer, [load(0, 30, prefill_tokens=90_000), load(1, 30)], cached={0: 999}).dp_rank == 1


def test_a_replica_whose_steps_take_much_longer_is_passed_over() -> None:
    loads = [load(0, 250, running_tokens=600_000), load(1, 10), load(2, 10), load(3, 10)]

    decision = choose(make_balancer(RoutingPolicy.PREFIX_AWARE), loads, cached={0: 900})

    assert decision.dp_rank != 0
    assert decision.reason is RoutingReason.BOUND


def test_one_running_request_does_not_keep_the_next_turn_from_its_prefix() -> None:
    idle = [load(rank) for rank in range(1, 4)]

    for running_tokens in (100, 3_000, 30_000):
        busy = load(0, 1, running_tokens=running_tokens)
        decision = choose(
            make_balancer(RoutingPolicy.PREFIX_AWARE),
            [busy, *idle],
            prompt=running_tokens + 50,
            cached={0: running_tokens},
        )
        assert decision.dp_rank == 0


def test_a_full_cache_costs_the_wait_for_blocks() -> None:
    loads = [
        load(0, 20, running_tokens=100_000, headroom_tokens=0),
        load(1, 20, running_tokens=100_000, headroom_tokens=50_000),
    ]

    scores = choose(make_balancer(RoutingPolicy.PREFIX_AWARE), loads).scores

    assert scores[0] > scores[1]


def test_prefixes_spread_while_little_waits_and_stay_together_while_much_does() -> None:
    balancer = make_balancer(RoutingPolicy.PREFIX_AWARE)
    idle = [load(0, 9, prefill_tokens=1100), load(1, 9)]
    busy = [load(0, 9, prefill_tokens=20_900), load(1, 9, prefill_tokens=20_000)]

    # The hit saves less than the wait before it; but computed twice, it holds up all that wait.
    assert choose(balancer, idle, prompt=1000, cached={0: 800}).dp_rank == 1
    assert choose(balancer, busy, prompt=1000, cached={0: 800}).dp_rank == 0
