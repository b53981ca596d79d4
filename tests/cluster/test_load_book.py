"""How busy each replica is: own requests are counted exactly once, whatever the snapshots have seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.front_end_board import Unreported
from phalanx.cluster.load_book import LoadBook, ReplicaLoad
from phalanx.cluster.load_table import FORGET_AFTER_S
from phalanx.engine.messages import AdmittedMark
from support.cluster import make_stats


def make_book(num_replicas: int = 1) -> LoadBook:
    book = LoadBook(client_index=0, incarnation=0)
    for rank in range(num_replicas):
        book.join(rank)
    return book


def mark(number: int, incarnation: int = 0) -> list[AdmittedMark]:
    return [AdmittedMark(client_index=0, incarnation=incarnation, number=number)]


def load_of(book: LoadBook, rank: int = 0, now: float = 0.0) -> ReplicaLoad:
    return book.loads([rank], now)[0]


def test_a_choice_counts_at_once_and_no_longer_twice_when_the_report_has_it() -> None:
    book = make_book()
    book.report(make_stats(0, num_running=2, num_prefill_tokens=10, sequence=1))
    number = book.add("a", 0, num_prompt_tokens=100, num_prefill_tokens=60)

    assert (load_of(book).num_requests, load_of(book).prefill_tokens) == (3, 70)
    book.report(make_stats(0, num_running=2, num_prefill_tokens=10, sequence=2))
    assert (load_of(book).num_requests, load_of(book).prefill_tokens) == (3, 70)
    book.report(
        make_stats(0, num_waiting=1, num_running=2, num_prefill_tokens=70, sequence=3, admitted=mark(number))
    )
    assert (load_of(book).num_requests, load_of(book).prefill_tokens) == (3, 70)


def test_the_mark_of_an_earlier_incarnation_says_nothing_of_our_requests() -> None:
    book = make_book()
    book.add("a", 0, num_prompt_tokens=100, num_prefill_tokens=60)
    book.report(make_stats(0, admitted=mark(99, incarnation=-1)))

    assert load_of(book).num_requests == 1


def test_a_prompt_that_was_computed_after_the_report_is_not_queued_any_more() -> None:
    book = make_book()
    number = book.add("a", 0, num_prompt_tokens=100, num_prefill_tokens=100)
    report = {"num_waiting": 1, "num_prefill_tokens": 130, "admitted": mark(number)}
    book.report(make_stats(0, reported_at=1.0, sequence=1, **report))
    book.first_token("a", 1.5)
    book.first_token("a", 1.6)

    assert load_of(book).prefill_tokens == 30
    book.report(make_stats(0, reported_at=2.0, sequence=2, num_running=1, num_prefill_tokens=30))
    assert load_of(book).prefill_tokens == 30


def test_an_unknown_replica_counts_as_busy_as_the_others() -> None:
    book = make_book(3)
    book.report(make_stats(0, num_running=4, num_prefill_tokens=100))
    book.report(make_stats(1, num_running=8, num_prefill_tokens=300))
    loads = book.loads([0, 1, 2], 0.0)

    assert [load.num_requests for load in loads] == [4, 8, 6]
    assert loads[2].prefill_tokens == 200
    assert not loads[2].is_known


def test_a_report_that_is_too_old_is_not_believed() -> None:
    book = make_book()
    book.report(make_stats(0, num_running=9, reported_at=0.0))

    assert load_of(book, now=FORGET_AFTER_S).num_requests == 9
    assert load_of(book, now=FORGET_AFTER_S + 1).num_requests == 0


def test_a_replica_that_comes_back_begins_with_nothing() -> None:
    book = make_book()
    book.add("a", 0, num_prompt_tokens=100, num_prefill_tokens=100)
    book.leave(0)
    book.join(0)

    assert load_of(book) == ReplicaLoad(0)
    book.finish("a", 1.0, num_output_tokens=5)
    assert load_of(book) == ReplicaLoad(0)


class Truth:
    """A replica that computes one prompt after the other, told of and asked exactly."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self.running: set[str] = set()
        self.last_number = 0
        self.sequence = 0


@given(st.lists(st.sampled_from(["send", "compute", "end", "report", "abort"]), max_size=60))
def test_with_one_front_end_the_numbers_are_exact_at_every_moment(events: list[str]) -> None:
    book, truth, now = make_book(), Truth(), 0.0
    book.report(make_stats(0))
    for count, event in enumerate(events):
        now += 1.0
        if event == "send":
            name = f"r{count}"
            truth.waiting[name] = 10 + count
            truth.last_number = book.add(name, 0, num_prompt_tokens=99, num_prefill_tokens=10 + count)
        elif event == "compute" and truth.waiting:
            name = next(iter(truth.waiting))
            del truth.waiting[name]
            truth.running.add(name)
            book.first_token(name, now)
        elif event == "end" and truth.running:
            name = min(truth.running)
            truth.running.remove(name)
            book.finish(name, now, num_output_tokens=3)
        elif event == "abort" and truth.waiting:
            name = next(reversed(truth.waiting))
            del truth.waiting[name]
            book.finish(name, now)
        elif event == "report":
            truth.sequence += 1
            book.report(
                make_stats(
                    0,
                    sequence=1 + truth.sequence,
                    reported_at=now,
                    num_waiting=len(truth.waiting),
                    num_running=len(truth.running),
                    num_prefill_tokens=sum(truth.waiting.values()),
                    admitted=mark(truth.last_number),
                )
            )
        load = load_of(book, now=0.0)
        assert load.num_own == load.num_requests == len(truth.waiting) + len(truth.running)
        assert load.prefill_tokens == sum(truth.waiting.values())


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["send", "token", "end", "report"]), st.integers(0, 1), st.integers(1, 90)),
        max_size=60,
    )
)
def test_what_two_front_ends_tell_each_other_makes_the_load_exact(events: list[tuple[str, int, int]]) -> None:
    """The replica takes what is sent at once; a report counts all that was sent before it."""
    books = [LoadBook(client_index=index) for index in range(2)]
    waiting: dict[str, tuple[int, int]] = {}
    running: dict[str, int] = {}
    last_number = [0, 0]
    for book in books:
        book.join(0)
        book.report(make_stats(0, sequence=0, reported_at=-1.0))
    for now, (kind, index, size) in enumerate(events, start=1):
        book = books[index]
        ours = [name for name, owner in running.items() if owner == index]
        queued = [name for name, (owner, _) in waiting.items() if owner == index]
        if kind == "send":
            last_number[index] = book.add(f"r{now}", 0, num_prompt_tokens=size, num_prefill_tokens=size)
            waiting[f"r{now}"] = (index, size)
        elif kind == "token" and queued:
            book.first_token(queued[0], float(now))
            running[queued[0]] = waiting.pop(queued[0])[0]
        elif kind == "end" and ours:
            book.finish(ours[0], float(now), num_output_tokens=1)
            del running[ours[0]]
        elif kind == "report":
            stats = make_stats(
                0,
                sequence=now,
                reported_at=float(now),
                num_waiting=len(waiting),
                num_running=len(running),
                num_prefill_tokens=sum(tokens for _, tokens in waiting.values()),
                admitted=[
                    AdmittedMark(client_index=which, incarnation=0, number=last_number[which])
                    for which in range(2)
                ],
            )
            for each in books:
                each.report(stats)

        for which in range(2):
            (load,) = books[which].loads([0], 0.0, [books[1 - which].unreported(0)])
            assert load.num_requests == len(waiting) + len(running)
            assert load.prefill_tokens == sum(tokens for _, tokens in waiting.values())


def test_without_other_front_ends_nothing_is_added() -> None:
    book = make_book()
    book.add("a", 0, num_prompt_tokens=10, num_prefill_tokens=10)

    assert book.unreported(0) == (10, 1, 10)
    assert book.unreported(7) == Unreported()
    assert book.loads([0], 0.0, ()) == book.loads([0], 0.0, [Unreported()])


def test_the_mean_output_follows_what_ends() -> None:
    book = make_book()
    for number in range(600):
        book.add(f"r{number}", 0, num_prompt_tokens=1, num_prefill_tokens=1)
        book.finish(f"r{number}", 0.0, num_output_tokens=40)

    assert book.mean_output_tokens == pytest.approx(40, rel=0.01)


def test_room_is_what_the_report_says_in_tokens_less_what_is_promised() -> None:
    book = make_book()
    # Of a model whose layers take four blocks for each column.
    book.report(make_stats(0, num_free_blocks=400, num_free_tokens=1600, num_prefill_tokens=100))
    book.add("a", 0, num_prompt_tokens=500, num_prefill_tokens=300)

    assert load_of(book).headroom_tokens == 1600 - 100 - 300


def test_loads_of_the_same_replicas_are_not_remembered_longer_than_reports_are_true() -> None:
    book = make_book(2)
    for rank in (0, 1):
        book.report(make_stats(rank, num_running=9, sequence=1, reported_at=float(rank)))

    assert all(load.is_known for load in book.loads([0, 1], 1.0))
    assert all(load.is_known for load in book.loads([0, 1], FORGET_AFTER_S))
    assert [load.is_known for load in book.loads([0, 1], FORGET_AFTER_S + 0.5)] == [False, True]
    book.join(1)
    assert not any(load.is_known for load in book.loads([0, 1], FORGET_AFTER_S + 0.5))
