"""The ring's words under many interleavings, with store buffers: nothing is lost, and no wake-up is."""

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from phalanx.shm import ring_end
from phalanx.shm.errors import QueueClosedError
from phalanx.shm.ring_buffer import RingReader, RingWriter, create_ring
from phalanx.shm.segment import SharedSegment
from support.interleaving import (
    BufferedWords,
    Deadlock,
    InterleavedFutex,
    InterleavedMembarrier,
    Interleaving,
)

NUM_RECORDS = 5


def read_word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


@pytest.fixture
def interleaved(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Interleaving]:
    """Have rings use the words and the futex of a run; each call begins another run with its seed."""

    def begin(seed: int) -> Interleaving:
        interleaving = Interleaving(seed)
        monkeypatch.setattr(ring_end, "map_words", lambda buffer: BufferedWords(interleaving, buffer))
        monkeypatch.setattr(ring_end, "NativeWords", lambda buffer: BufferedWords(interleaving, buffer))
        monkeypatch.setattr(ring_end, "Membarrier", lambda: InterleavedMembarrier(interleaving))
        monkeypatch.setattr(ring_end, "Futex", lambda: InterleavedFutex(interleaving, read_word))
        return interleaving

    monkeypatch.setattr(ring_end, "_MIN_SPIN_ROUNDS", 0)
    monkeypatch.setattr(ring_end, "_MAX_SPIN_ROUNDS", 0)
    return begin


class SharedMapping(SharedSegment):
    """A segment that all ends of a ring share, so that a futex address means the same to all of them."""

    def close(self) -> None:
        """Left to the owner."""


@contextmanager
def ring(num_readers: int) -> Iterator[tuple[RingWriter, list[RingReader]]]:
    with create_ring("test", capacity=256, num_readers=num_readers) as segment:
        shared = SharedMapping(segment.fd, segment.size)
        writer = RingWriter(shared)
        readers = [RingReader(shared, index) for index in range(num_readers)]
        try:
            yield writer, readers
        finally:
            writer.close()
            for reader in readers:
                reader.close()
            shared.buffer.release()
            shared._mapping.close()


@pytest.mark.parametrize("num_readers", [1, 2])
def test_every_interleaving_delivers_everything_and_ends(
    interleaved: Callable[[int], Interleaving], num_readers: int
) -> None:
    """Two of the records fit, so that the writer waits too; the close is seen after the last record."""
    for seed in range(150):
        interleaving = interleaved(seed)
        got: list[list[int]] = [[] for _ in range(num_readers)]
        with ring(num_readers) as (writer, readers):
            bodies = [lambda writer=writer: write_all(writer)]
            for reader, numbers in zip(readers, got, strict=True):
                bodies.append(lambda reader=reader, numbers=numbers: read_all(reader, numbers))
            interleaving.run(bodies)
        assert got == [list(range(NUM_RECORDS))] * num_readers


def write_all(writer: RingWriter) -> None:
    for number in range(NUM_RECORDS):
        writer.write(bytes([number]) * 100, deadline_at=math.inf)
    writer.close()


def read_all(reader: RingReader, numbers: list[int]) -> None:
    try:
        while True:
            with reader.read(deadline_at=math.inf) as view:
                assert bytes(view) == bytes([view[0]]) * 100
                numbers.append(view[0])
    except QueueClosedError:
        return


def ping_pong(interleaving: Interleaving) -> None:
    """Two threads wait for each other's record in turn: any wake-up that is lost stops both."""
    with ring(1) as (to_b, (from_a,)), ring(1) as (to_a, (from_b,)):

        def play(out: RingWriter, into: RingReader, is_first: bool) -> None:
            for _ in range(NUM_RECORDS):
                if is_first:
                    out.write(b"ping", deadline_at=math.inf)
                with into.read(deadline_at=math.inf):
                    pass
                if not is_first:
                    out.write(b"pong", deadline_at=math.inf)

        interleaving.run([lambda: play(to_b, from_b, True), lambda: play(to_a, from_a, False)])


def test_no_wake_up_is_lost(interleaved: Callable[[int], Interleaving]) -> None:
    for seed in range(150):
        ping_pong(interleaved(seed))


def test_a_flag_without_the_barrier_for_all_would_lose_a_wake_up(
    interleaved: Callable[[int], Interleaving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The explorer finds the classic fault, so its silence above means something."""

    def explore() -> None:
        for seed in range(150):
            interleaving = interleaved(seed)
            useless = InterleavedMembarrier(interleaving, is_effective=False)
            monkeypatch.setattr(ring_end, "Membarrier", lambda useless=useless: useless)
            ping_pong(interleaving)

    with pytest.raises(Deadlock):
        explore()
