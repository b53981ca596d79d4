"""The prefix index equals what the replicas hold, plus what our own requests are about to make."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from phalanx.cluster.prefix_index import PrefixIndex
from phalanx.engine.prefix_log import KEY_BYTES, PrefixDelta, PrefixLog

RANKS = st.integers(0, 2)
NUMBERS = st.integers(0, 6)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


def test_the_match_ends_for_each_replica_at_its_first_missing_block() -> None:
    index = PrefixIndex()
    for rank, numbers in {0: (1, 2, 3), 1: (1, 3), 5: (2, 3)}.items():
        index.apply(rank, PrefixDelta(epoch=0, sequence=0, clears=True, stored=b"".join(map(key, numbers))))

    assert index.match([key(1), key(2), key(3), key(4)]) == {0: 3, 1: 1}
    assert index.match([key(9)]) == {}
    assert index.match([]) == {}


def test_nothing_is_believed_of_a_replica_before_it_has_told_everything() -> None:
    index = PrefixIndex()

    assert not index.apply(0, PrefixDelta(epoch=0, sequence=4, stored=key(1)))
    assert index.match([key(1)]) == {}
    assert index.num_gaps == 0


@pytest.mark.parametrize("late", [(0, 3), (0, 1), (1, 2)])
def test_after_a_gap_nothing_is_known_until_everything_is_told_again(late: tuple[int, int]) -> None:
    index = PrefixIndex()
    index.apply(0, PrefixDelta(epoch=0, sequence=1, clears=True, stored=key(1)))

    epoch, sequence = late
    assert not index.apply(0, PrefixDelta(epoch=epoch, sequence=sequence, stored=key(2)))
    assert index.match([key(1)]) == {}
    assert index.num_gaps == 1
    assert index.apply(0, PrefixDelta(epoch=1, sequence=7, clears=True, stored=key(1)))
    assert index.match([key(1)]) == {0: 1}


def test_memory_is_bounded_and_what_was_left_out_is_counted() -> None:
    index = PrefixIndex(max_keys=2)
    index.apply(0, PrefixDelta(epoch=0, sequence=0, clears=True, stored=key(1) + key(2) + key(3)))

    assert (index.num_keys, index.num_left_out) == (2, 1)
    assert index.apply(0, PrefixDelta(epoch=0, sequence=1, removed=key(3) + key(1)))
    assert index.num_keys == 1
    index.check_invariants()


class IndexBesideTheTruth(RuleBasedStateMachine):
    """Real logs on one side, sets and counts on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.logs = {rank: PrefixLog(epoch=0) for rank in range(3)}
        self.held: dict[int, set[bytes]] = {rank: set() for rank in range(3)}
        self.told: dict[int, set[bytes]] = {rank: set() for rank in range(3)}
        self.expected: dict[int, Counter[bytes]] = {rank: Counter() for rank in range(3)}
        for rank, log in self.logs.items():
            assert self.index.apply(rank, log.follow(()))

    @rule(rank=RANKS, number=NUMBERS)
    def the_cache_changes(self, rank: int, number: int) -> None:
        self.held[rank] ^= {key(number)}
        self.logs[rank].record(key(number), key(number) in self.held[rank])

    @rule(rank=RANKS)
    def the_cache_is_cleared(self, rank: int) -> None:
        self.held[rank] = set()
        self.logs[rank].record_cleared()

    @rule(rank=RANKS, is_lost=st.booleans())
    def a_delta_is_sent(self, rank: int, is_lost: bool) -> None:
        delta = self.logs[rank].take_delta()
        if delta is None:
            return
        if is_lost or not self.index.apply(rank, delta):
            assert self.index.apply(rank, self.logs[rank].follow(self.held[rank]))
        self.told[rank] = set(self.held[rank])

    @rule(rank=RANKS, numbers=st.lists(NUMBERS, max_size=4, unique=True))
    def a_request_is_sent(self, rank: int, numbers: list[int]) -> None:
        keys = [key(number) for number in numbers]
        self.index.expect(rank, keys)
        self.expected[rank].update(keys)

    @rule(rank=RANKS, numbers=st.lists(NUMBERS, max_size=4, unique=True))
    def a_request_has_its_first_token(self, rank: int, numbers: list[int]) -> None:
        keys = [key(number) for number in numbers if self.expected[rank][key(number)]]
        self.index.settle(rank, keys)
        self.expected[rank].subtract(keys)

    @rule(rank=RANKS)
    def a_replica_is_lost_and_comes_back_empty(self, rank: int) -> None:
        self.index.forget(rank)
        self.logs[rank] = PrefixLog(epoch=1)
        self.held[rank], self.told[rank] = set(), set()
        self.expected[rank].clear()
        assert self.index.apply(rank, self.logs[rank].follow(()))

    @invariant()
    def each_key_has_exactly_its_holders(self) -> None:
        self.index.check_invariants()
        for number in range(7):
            holders = {
                rank: 1
                for rank in range(3)
                if key(number) in self.told[rank] or self.expected[rank][key(number)] > 0
            }
            assert self.index.match([key(number)]) == holders


TestIndexBesideTheTruth = IndexBesideTheTruth.TestCase
TestIndexBesideTheTruth.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
