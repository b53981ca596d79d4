"""One front end's routing as a whole: sessions, explicit replicas, admission, and books that close."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.errors import NoReplicaError
from phalanx.cluster.front_end_board import NUM_COLUMNS, FrontEndBoard
from phalanx.cluster.request_router import RequestRouter
from phalanx.cluster.routing import RoutingOptions, RoutingPolicy, RoutingReason
from phalanx.engine.errors import InvalidRequestError, QueueFullError
from phalanx.engine.messages import (
    AdmittedMark,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    StepOutputs,
)
from phalanx.engine.prefix_log import PrefixDelta, block_keys
from phalanx.shm.number_table import NumberTable
from support.cluster import make_stats
from support.engine import make_request


def make_router(num_replicas: int = 2, **options: object) -> RequestRouter:
    router = RequestRouter(RoutingOptions(**options))  # type: ignore[arg-type]
    for rank in range(num_replicas):
        router.join(rank, block_size=4)
    return router


def request(name: str, num_prompt_tokens: int = 9, **changes: object) -> EngineCoreRequest:
    made = make_request(name, num_prompt_tokens=num_prompt_tokens)
    return msgspec.structs.replace(made, **changes)


def hashes(*names: str) -> list[bytes]:
    return [name.encode().ljust(32, b".") for name in names]


def test_a_request_goes_where_its_prefix_is_and_carries_what_is_expected_there() -> None:
    router = make_router()
    held = hashes("a", "b")
    router.take_delta(0, PrefixDelta(epoch=0, sequence=-1, clears=True))
    router.take_delta(1, PrefixDelta(epoch=0, sequence=-1, clears=True, stored=b"".join(block_keys(held))))

    sent, decision = router.route(request("r", block_hashes=held), [0, 1], 0.0)

    assert (decision.dp_rank, decision.reason) == (1, RoutingReason.PREFIX)
    assert sent.num_expected_cached_tokens == 8
    assert sent.number == 1


def test_a_prompt_under_way_counts_as_held_until_its_first_token() -> None:
    router = make_router()
    same = hashes("a", "b")
    for rank in (0, 1):
        router.take_delta(rank, PrefixDelta(epoch=0, sequence=-1, clears=True))
    _, first = router.route(request("r0", block_hashes=same), [0, 1], 0.0)
    second, _ = router.route(request("r1", block_hashes=same), [first.dp_rank], 0.0)
    assert second.num_expected_cached_tokens == 8

    first_token = EngineCoreOutput(request_id="r0", new_token_ids=[1], num_cached_tokens=1)
    router.observe(StepOutputs(request_ids=["r1"], token_ids=[1], others=[first_token]), 1.0)
    third, _ = router.route(request("r2", block_hashes=same), [first.dp_rank], 0.0)
    # It never told that it holds them.
    assert third.num_expected_cached_tokens == 0


def test_the_replica_that_the_client_asks_for_is_taken_or_refused() -> None:
    router = make_router()

    _, decision = router.route(request("r", routed_dp_rank=1), [0, 1], 0.0)
    assert (decision.dp_rank, decision.reason) == (1, RoutingReason.ASKED_FOR)
    with pytest.raises(InvalidRequestError, match="replica 1 does not serve") as caught:
        router.route(request("s", routed_dp_rank=1), [0], 0.0)
    assert caught.value.field == "X-Phalanx-Replica"


def test_no_replica_is_an_error_whatever_was_asked() -> None:
    with pytest.raises(NoReplicaError):
        make_router().route(request("r", routed_dp_rank=1), [], 0.0)


def test_samples_of_one_prompt_stay_together() -> None:
    router = make_router()
    ranks = {router.route(request(f"g#{i}", group_id="g"), [0, 1], 0.0)[1].dp_rank for i in range(5)}

    assert len(ranks) == 1
    assert router.num_by_reason[RoutingReason.GROUP] == 4


def test_sessions_stick_where_that_is_wanted_and_move_when_their_replica_is_gone() -> None:
    router = make_router(sticky_sessions=True, policy=RoutingPolicy.ROUND_ROBIN)

    def send(name: str, ready: list[int]) -> tuple[int, RoutingReason]:
        decision = router.route(request(name, session_id="s"), ready, 0.0)[1]
        return decision.dp_rank, decision.reason

    first, _ = send("a", [0, 1])
    assert send("b", [0, 1]) == (first, RoutingReason.SESSION)
    router.leave(first)
    other = 1 - first
    assert send("c", [other])[0] == other
    router.join(first, block_size=4)
    assert send("d", [0, 1]) == (other, RoutingReason.SESSION)


def test_a_full_queue_is_passed_over_and_when_all_are_full_the_client_shall_come_back() -> None:
    router = make_router(max_num_waiting_per_replica=3)
    router.take_report(make_stats(0, num_waiting=3, num_prefill_tokens=10))
    router.take_report(make_stats(1, num_waiting=2, num_prefill_tokens=90_000))

    assert router.route(request("a"), [0, 1], 0.0)[1].dp_rank == 1
    with pytest.raises(QueueFullError) as caught:
        router.route(request("b"), [0, 1], 0.0)
    assert 1 <= caught.value.retry_after_s <= 60
    # What was admitted once is never refused.
    router.route(request("c"), [0, 1], 0.0, is_replay=True)
    assert router.num_by_reason[RoutingReason.REPLAY] == 1


def test_there_is_a_limit_for_all_replicas_together() -> None:
    router = make_router(max_num_waiting=5)
    router.take_report(make_stats(0, num_waiting=3))
    router.take_report(make_stats(1, num_waiting=1))
    router.route(request("a"), [0, 1], 0.0)

    with pytest.raises(QueueFullError):
        router.route(request("b"), [0, 1], 0.0)


@given(st.lists(st.sampled_from(["send", "token", "end", "drop", "lose", "join"]), max_size=80))
def test_when_all_requests_are_over_no_book_holds_anything(events: list[str]) -> None:
    router, open_names, ready = make_router(), list[str](), [0, 1]
    where = dict[str, int]()
    for count, event in enumerate(events):
        if event == "send" and ready:
            name = f"r{count}"
            _, decision = router.route(request(name, block_hashes=hashes("a", name)), ready, float(count))
            open_names.append(name)
            where[name] = decision.dp_rank
        elif event == "token" and open_names:
            router.observe(StepOutputs(request_ids=open_names[:1], token_ids=[1]), float(count))
        elif event == "end" and open_names:
            output = EngineCoreOutput(request_id=open_names.pop(0), finish_reason=FinishReason.STOP)
            router.observe(StepOutputs(others=[output]), float(count))
        elif event == "drop" and open_names:
            router.drop(open_names.pop(), float(count))
        elif event == "lose" and ready:
            rank = ready.pop()
            router.leave(rank)
            open_names = [name for name in open_names if where[name] != rank]
        elif event == "join" and len(ready) < 2:
            rank = 1 - ready[0] if ready else 0
            router.join(rank, block_size=4)
            ready.append(rank)
        router._index.check_invariants()
    for name in open_names:
        router.drop(name, 1000.0)

    assert router._index.num_keys == 0
    assert not router._routed
    assert not router._book._choices
    assert all(load.num_own == load.num_requests == 0 for load in router._book.loads(ready, 0.0))


def test_the_limit_of_all_queues_counts_what_other_front_ends_have_just_sent() -> None:
    table = NumberTable.private(2, NUM_COLUMNS)
    routers = [
        RequestRouter(
            RoutingOptions(max_num_waiting=4, num_clients=2),
            client_index=index,
            board=FrontEndBoard(table, index),
        )
        for index in range(2)
    ]
    for router in routers:
        router.join(0, block_size=4)
    for number in range(4):
        routers[number % 2].route(request(f"r{number}"), [0], 0.0)
    for router in routers:
        with pytest.raises(QueueFullError):
            router.route(request("more"), [0], 0.0)

    # A report that counts them is no second time, whoever reads it first.
    marks = [AdmittedMark(client_index=index, incarnation=0, number=2) for index in range(2)]
    stats = msgspec.structs.replace(make_stats(0, num_waiting=3, reported_at=1.0), admitted=marks)
    for router in routers:
        router.take_report(stats)
    routers[0].route(request("fourth"), [0], 1.0)
    with pytest.raises(QueueFullError):
        routers[1].route(request("fifth"), [0], 1.0)
    routers[0].drop("fourth", 2.0)
    routers[1].route(request("fifth"), [0], 2.0)


def test_front_ends_see_each_others_choices_at_once_and_no_more_when_they_have_come_to_nothing() -> None:
    table = NumberTable.private(2, NUM_COLUMNS)
    routers = []
    for index in range(2):
        options = RoutingOptions(policy=RoutingPolicy.LEAST_LOADED, num_clients=2)
        router = RequestRouter(options, client_index=index, board=FrontEndBoard(table, index))
        for rank in (0, 1):
            router.join(rank, block_size=4)
            router.take_report(make_stats(rank))
        routers.append(router)
    ready = [0, 1]

    # Each begins its turns elsewhere: only the board tells the second one that the first has chosen.
    chosen = [routers[number % 2].route(request(f"r{number}"), ready, 0.0)[1].dp_rank for number in range(10)]
    assert sorted(chosen[:2]) == [0, 1]
    assert chosen.count(0) == 5
    assert [load.num_requests for load in routers[0].loads(ready, 0.0)] == [5, 5]

    for number in range(0, 10, 2):
        routers[0].drop(f"r{number}", 1.0)
    routers[1].leave(chosen[1])
    left = [chosen[number] for number in range(1, 10, 2) if chosen[number] != chosen[1]]
    assert sum(load.num_requests for load in routers[0].loads(ready, 1.0)) == len(left)


def test_several_front_ends_agree_on_the_replica_of_a_session() -> None:
    options = {"sticky_sessions": True, "num_clients": 2}
    routers = [make_router(4, **options), make_router(4, **options)]
    homes = set()
    for number in range(32):
        sent = [
            router.route(request(f"{number}-{ready[0]}", session_id=f"s{number}"), ready, 0.0)[1]
            for ready in ([0, 1, 2, 3], [3, 1, 0, 2])
            for router in routers
        ]
        assert {decision.reason for decision in sent} == {RoutingReason.SESSION}
        (home,) = {decision.dp_rank for decision in sent}
        homes.add(home)
        others = [rank for rank in range(4) if rank != home]
        moved = [
            router.route(request(f"{number}-{index}", session_id=f"s{number}"), others, 0.0)[1].dp_rank
            for index, router in enumerate(routers)
        ]
        assert moved[0] == moved[1] != home
    assert homes == {0, 1, 2, 3}
