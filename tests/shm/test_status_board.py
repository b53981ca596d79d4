"""The status board: one row of facts per rank, never torn."""

import itertools
import os
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.shm.ordering import map_words
from phalanx.shm.segment import SharedSegment
from phalanx.shm.status_board import Phase, RankStatus, StatusBoard


@pytest.fixture
def board() -> Iterator[StatusBoard]:
    board = StatusBoard.create(2)
    yield board
    board.close()


def test_a_fresh_slot_is_not_started(board: StatusBoard) -> None:
    assert board.read(1) == RankStatus(phase=Phase.NOT_STARTED, since_at=0.0, call_id=0, step=0)


def test_another_mapping_reads_what_was_written(board: StatusBoard) -> None:
    before = time.monotonic()
    board.writer(1).set(Phase.FORWARD, call_id=7, step=5)
    other = StatusBoard.attach(os.dup(board.fd), 2)

    status = other.read(1)
    assert (status.phase, status.call_id, status.step) == (Phase.FORWARD, 7, 5)
    assert before <= status.since_at <= time.monotonic()
    assert other.read(0).phase is Phase.NOT_STARTED
    other.close()


def test_what_is_not_given_stays(board: StatusBoard) -> None:
    slot = board.writer(0)
    slot.set(Phase.FORWARD, call_id=7, step=5)
    slot.set(Phase.SAMPLING)

    status = board.read(0)
    assert (status.phase, status.call_id, status.step) == (Phase.SAMPLING, 7, 5)


def test_a_phase_without_a_number_is_other() -> None:
    assert Phase.named("KV cache") is Phase.KV_CACHE
    assert Phase.named("dancing") is Phase.OTHER


def test_a_reader_never_sees_half_a_change(board: StatusBoard) -> None:
    slot = board.writer(0)
    is_over = threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            slot.set(Phase.FORWARD, call_id=number, step=number)

    thread = threading.Thread(target=write)
    thread.start()
    statuses = [board.read(0) for _ in range(3000)]
    is_over.set()
    thread.join()

    assert all(status.call_id == status.step for status in statuses)
    assert all(a.since_at <= b.since_at for a, b in itertools.pairwise(statuses))


def test_a_writer_that_died_in_the_middle_blocks_neither_readers_nor_its_successor() -> None:
    with SharedSegment.create("test", 64) as segment:
        board = StatusBoard(SharedSegment.attach(os.dup(segment.fd), 64))
        board.writer(0).set(Phase.FORWARD, call_id=1)
        words = map_words(segment.buffer)
        words.store(0, words.load(0) + 1)

        assert board.read(0).phase is Phase.FORWARD
        board.writer(0).set(Phase.IDLE)
        assert words.load(0) % 2 == 0
        assert board.read(0).phase is Phase.IDLE
        words.close()
        board.close()


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_does_not_exist_is_an_error(board: StatusBoard, slot: int) -> None:
    with pytest.raises(IndexError):
        board.read(slot)
    with pytest.raises(IndexError):
        board.writer(slot)
