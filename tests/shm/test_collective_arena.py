"""The arena: every rank reads what every rank wrote, in every interleaving; and no wait outlives its peer."""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from phalanx.shm import collective_arena
from phalanx.shm.collective_arena import Collective, CollectiveArena, create_arena
from phalanx.shm.errors import CollectiveError, ProtocolError
from phalanx.shm.process import ChildSpec, Spawner, wait_all_ready
from phalanx.shm.segment import SharedSegment
from support.arena_peers import RankArgs
from support.interleaving import BufferedWords, Deadlock, InterleavedFutex, Interleaving

NUM_EXCHANGES = 4


class SharedMapping(SharedSegment):
    """A segment that all ranks share, so that a futex address means the same to all of them."""

    def close(self) -> None:
        """Left to the owner."""


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner("test")
    spawner.start()
    yield spawner
    spawner.close()


def arenas_of(num_ranks: int, timeout_s: float = 30.0) -> list[CollectiveArena]:
    """All ranks in this process, each with a mapping of its own."""
    segment = create_arena("test", num_ranks=num_ranks, slot_bytes=64)
    ranks = [
        CollectiveArena(SharedSegment.attach(os.dup(segment.fd), segment.size), rank, timeout_s=timeout_s)
        for rank in range(num_ranks)
    ]
    segment.close()
    return ranks


def meet_all(ranks: list[CollectiveArena]) -> None:
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(CollectiveArena.meet, ranks))


def close_all(ranks: list[CollectiveArena]) -> None:
    for arena in ranks:
        arena.close()
        arena.close()


# Interleavings -------------------------------------------------------------------------------------------------


def exchange_numbers(
    arena: CollectiveArena, data: BufferedWords, got: list[list[int]], half: int | None
) -> None:
    """Write a number of its own before each exchange, and read everybody's after it. half: None: as it should be."""
    for number in range(NUM_EXCHANGES):
        where = arena.half if half is None else half
        data.store((arena.rank * 2 + where) * 8, number * 10 + arena.rank)
        arena.exchange(Collective.ALL_GATHER, 8)
        got.append([data.load((rank * 2 + where) * 8) for rank in range(arena.num_ranks)])


def explore(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, *, num_seeds: int, half: int | None = None
) -> None:
    """Run many interleavings, and compare what was read with what was written."""
    monkeypatch.setattr(collective_arena, "_MIN_SPIN_S", 0.0)
    monkeypatch.setattr(collective_arena, "_MAX_SPIN_S", 0.0)
    for seed in range(num_seeds):
        run = Interleaving(seed)
        monkeypatch.setattr(collective_arena, "map_words", lambda buffer, run=run: BufferedWords(run, buffer))
        monkeypatch.setattr(collective_arena, "Futex", lambda run=run: InterleavedFutex(run, read_word))
        segment = create_arena("test", num_ranks=num_ranks, slot_bytes=64)
        shared = SharedMapping(segment.fd, segment.size)
        ranks = [CollectiveArena(shared, rank) for rank in range(num_ranks)]
        data = [BufferedWords(run, arena.data) for arena in ranks]
        got: list[list[list[int]]] = [[] for _ in ranks]
        try:
            run.run(
                [
                    lambda arena=arena, words=words, rows=rows: exchange_numbers(arena, words, rows, half)
                    for arena, words, rows in zip(ranks, data, got, strict=True)
                ]
            )
        finally:
            for words in data:
                words.close()
            close_all(ranks)
            shared.buffer.release()
            shared._mapping.close()
            segment.close()
        expected = [[number * 10 + rank for rank in range(num_ranks)] for number in range(NUM_EXCHANGES)]
        assert got == [expected] * num_ranks, f"seed {seed}"


def read_word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_interleaving_reads_what_was_written_and_ends(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    explore(monkeypatch, num_ranks, num_seeds=150)


def test_one_slot_for_each_rank_would_be_overwritten_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The explorer finds the fault that the second slot avoids, so its silence above means something."""
    with pytest.raises(AssertionError, match="seed"):
        explore(monkeypatch, 2, num_seeds=150, half=0)


def test_waking_nobody_would_leave_a_rank_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterleavedFutex, "wake", lambda self, address: 0)
    with pytest.raises(Deadlock):
        explore(monkeypatch, 2, num_seeds=150)


# Peers that do not come ----------------------------------------------------------------------------------------


def test_a_killed_rank_is_named_within_a_second(spawner: Spawner) -> None:
    segment = create_arena("test", num_ranks=2, slot_bytes=64)
    args = RankArgs(fd=segment.fd, size=segment.size, rank=1, num_exchanges=3)
    child = spawner.spawn(
        ChildSpec(
            role="peer",
            target="support.arena_peers:exchange_and_die",
            args=msgspec.msgpack.encode(args),
            pass_fds=(segment.fd,),
        )
    )
    wait_all_ready([child], time.monotonic() + 20)
    arena = CollectiveArena(segment, 0, timeout_s=30)
    arena.meet()
    for _ in range(3):
        arena.exchange(Collective.BARRIER, 0)
    child.wait(20)
    began_at = time.monotonic()

    with pytest.raises(CollectiveError, match="rank 1 is gone, and rank 0 waits for it in all-reduce"):
        arena.exchange(Collective.ALL_REDUCE, 8)

    assert time.monotonic() - began_at < 1.0
    arena.close()
    child.stop(reason="test", timeout_s=5)


def test_a_rank_that_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = arenas_of(2)
    meet_all(ranks)
    ranks[1].close()

    with pytest.raises(CollectiveError, match="rank 1 is gone"):
        ranks[0].exchange(Collective.BARRIER, 0)
    close_all(ranks)


def test_what_a_rank_posted_before_it_left_counts() -> None:
    ranks = arenas_of(2)
    meet_all(ranks)
    ranks[1].data[64 * 3] = 7
    leaver = threading.Thread(target=lambda: (ranks[1].exchange(Collective.ALL_GATHER, 1), ranks[1].close()))
    leaver.start()
    ranks[0].exchange(Collective.ALL_GATHER, 1)
    leaver.join()

    assert ranks[0].data[64 * 3] == 7
    close_all(ranks)


def test_a_rank_that_does_not_come_is_late() -> None:
    ranks = arenas_of(3, timeout_s=0.05)

    with pytest.raises(CollectiveError, match=r"rank 1 did not come to meeting within 0\.05 s of rank 0"):
        ranks[0].meet()
    close_all(ranks)


@pytest.mark.parametrize("other", [(Collective.BROADCAST, 8), (Collective.ALL_REDUCE, 16)])
def test_ranks_in_different_collectives_are_told(other: tuple[Collective, int]) -> None:
    ranks = arenas_of(2)
    meet_all(ranks)
    problems: list[str] = []

    def exchange(arena: CollectiveArena, kind: Collective, num_bytes: int) -> None:
        try:
            arena.exchange(kind, num_bytes)
        except CollectiveError as error:
            problems.append(str(error))

    threads: list[Callable[[], None]] = [
        lambda: exchange(ranks[0], Collective.ALL_REDUCE, 8),
        lambda: exchange(ranks[1], *other),
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda call: call(), threads))

    assert f"rank 1 is in {other[0]} of {other[1]} bytes, and rank 0 in all-reduce of 8 bytes" in problems
    assert len(problems) == 2
    close_all(ranks)


def test_what_is_no_arena_is_refused() -> None:
    with SharedSegment.create("test", 256) as segment, pytest.raises(ProtocolError, match="arena"):
        CollectiveArena(segment, 0)
    segment = create_arena("test", num_ranks=2, slot_bytes=64)
    with pytest.raises(ProtocolError, match="rank 2 in an arena of 2"):
        CollectiveArena(segment, 2)
    segment.close()


@pytest.mark.parametrize(("num_ranks", "slot_bytes"), [(0, 64), (65, 64), (2, 0), (2, 100)])
def test_impossible_arenas_are_refused(num_ranks: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"ranks|slots"):
        create_arena("test", num_ranks=num_ranks, slot_bytes=slot_bytes)
