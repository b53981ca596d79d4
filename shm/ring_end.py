"""What the two ends of a ring share: the mapped lines, making a cursor known, and the wait for the other side's.

Called by: ring_writer.py and ring_reader.py; one thread per end. Whoever publishes (a writer a record, a reader the
room that it gives back) does the same two steps, and whoever waits the same two, so that one argument covers both
directions.

  publish                              wait
    1  store word    (release)           4  raise the own flag
    2  load the flags of the others      5  barrier for all (system call)
    3  wake, when one is up              6  load word    (acquire); its cursor moved: done; closed: raise
       (system call)                     7  sleep unless the word has changed since (system call); go to 6
                                         8  when it is over, lower the own flag
  close: as publish, with the bit for "closed" set beside the cursor, and always with the system call

No wake-up is lost. The barrier of 5 falls somewhere into what a publisher does. Behind 1: then 6 and 7 see what was
stored. Before 1: then 2 sees the flag. Where 3 is done, either the kernel sees in 7 what 1 has stored and does not
sleep, or it queued the sleeper before it looked at the word, and 3, which stands behind 1, finds it in the queue: each
of the two system calls has a full barrier between its write (the word; the queue) and its read (the queue; the word).
So an end that never sleeps costs nobody a system call, and the barrier is paid by who has time: it is about to sleep.
Without 5 the flag would lose wake-ups on x86-64, too. And a closing is never seen before the last record: they are
one word.

Where there is no barrier for all, nobody does 4, 5 and 8: all flags are up for ever (ring_layout.py).

What each machine needs for 1 and 6 stands in ordering.py. tests/support/ring_model.py is this list as a program
for a model of both machines, and breaks when any of it is left out.

When the peer dies: a wait looks every 0.25 s at `is_peer_alive` and raises QueueClosedError. What was published
before can still be read.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from .errors import ProtocolError, QueueClosedError, TransportError
from .ordering import CACHE_LINE_BYTES, Futex, Membarrier, NativeWords, map_words
from .ring_layout import (
    CLOSED,
    CURSOR_MASK,
    HAS_FLAGS,
    MAGIC,
    WRITER_FLAG,
    WRITER_WORD,
    flags_bytes,
    lines_bytes,
    max_record_bytes,
    reader_flag,
    reader_word,
    ring_bytes,
)
from .segment import SharedSegment

WAIT_SLICE_S = 0.25
"""Longest sleep before a wait looks at its peer again."""

_LOOKS_PER_ROUND = 8
"""Loads between two offers of the core to others, together about a microsecond. Few: when both ends were put on one
core, the other end can answer only after the offer."""
_MIN_SPIN_ROUNDS = 2
_MAX_SPIN_ROUNDS = 64
_SHORT_SLEEP_S = 60e-6
"""What a sleep and a wake-up cost on a small virtual machine: who slept for less had better looked on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStats:
    """One end of a ring at one moment.

    num_records, num_bytes: written or read by this end, headers and padding not counted
    num_waits:              how often this end slept
    used_bytes:             written and not yet released by the slowest reader (writer) or this one (reader)
    """

    capacity: int
    num_readers: int
    num_records: int
    num_bytes: int
    num_waits: int
    used_bytes: int


def always_alive() -> bool:
    """Say that the peer lives; for who learns of its death in another way."""
    return True


class RingEnd:
    """One end of a ring. Owns the segment.

    reader: index of this reader, or None for the writer
    data:   the memory of the records; a reader may not write it

    Raises ProtocolError for a segment without a ring, TransportError where this process may not do what the ring's
    maker can (barriers for all).
    """

    # More attributes than an instance's dict is quick with.
    __slots__ = (
        "_cells",
        "_cursor",
        "_flag_words",
        "_flags",
        "_futex",
        "_headers",
        "_is_closed",
        "_is_peer_alive",
        "_membarrier",
        "_num_bytes",
        "_num_records",
        "_num_waits",
        "_others_flags",
        "_own",
        "_own_flag",
        "_segment",
        "_spin_rounds",
        "_wake",
        "_words",
        "capacity",
        "data",
        "max_record_bytes",
        "num_readers",
    )

    def __init__(self, segment: SharedSegment, reader: int | None, is_peer_alive: Callable[[], bool]) -> None:
        head = map_words(segment.buffer[:CACHE_LINE_BYTES])
        magic, self.capacity, self.num_readers = head.load(0), head.load(1), head.load(2)
        has_flags = head.load(HAS_FLAGS)
        head.close()
        if magic != MAGIC or segment.size != ring_bytes(self.capacity, self.num_readers):
            raise ProtocolError("the segment does not hold a ring")
        if reader is not None and not 0 <= reader < self.num_readers:
            raise ValueError(f"reader {reader} of {self.num_readers}")
        self._membarrier = Membarrier() if has_flags else None
        if self._membarrier is not None and not self._membarrier.is_available:
            raise TransportError("membarrier: forbidden in this process, and the ring was made for it")
        num_line_bytes = lines_bytes(self.num_readers)
        self.max_record_bytes = max_record_bytes(self.capacity)
        self._segment = segment
        self._words = map_words(segment.buffer[:num_line_bytes])
        self._cells = self._words.cells
        self.data = segment.buffer[num_line_bytes:]
        self._headers = self.data.cast("Q")
        self._is_peer_alive = is_peer_alive
        self._futex = Futex()
        self._own = WRITER_WORD if reader is None else reader_word(reader)
        self._wake = self._futex.waker(self._words.address(self._own))
        first_flag = num_line_bytes - flags_bytes(self.num_readers)
        # Plain on every machine: what orders them is the barrier for all.
        self._flag_words = NativeWords(segment.buffer[first_flag:num_line_bytes])
        self._flags = self._flag_words.cells
        readers_flags = tuple(map(reader_flag, range(self.num_readers)))
        self._own_flag, self._others_flags = (
            (WRITER_FLAG, readers_flags) if reader is None else (reader_flag(reader), (WRITER_FLAG,))
        )
        self._cursor = self._cells[self._own] & CURSOR_MASK
        self._spin_rounds = _MIN_SPIN_ROUNDS
        self._is_closed = False
        self._num_records = 0
        self._num_bytes = 0
        self._num_waits = 0

    def close(self) -> None:
        """Tell the other side that this end is done, and unmap. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._cells[self._own] = self._cursor | CLOSED
        self._wake()
        self._words.close()
        self._flag_words.close()
        self._headers.release()
        self.data.release()
        self._segment.close()

    def _stats(self, used_bytes: int) -> RingStats:
        return RingStats(
            capacity=self.capacity,
            num_readers=self.num_readers,
            num_records=self._num_records,
            num_bytes=self._num_bytes,
            num_waits=self._num_waits,
            used_bytes=used_bytes,
        )

    def _advance(self, cursor: int, num_bytes: int) -> None:
        """Count a record of `num_bytes`; make `cursor` visible to the other side and wake who sleeps: steps 1 to 3."""
        self._num_records += 1
        self._num_bytes += num_bytes
        self._cursor = cursor
        self._cells[self._own] = cursor
        flags = self._flags
        for flag in self._others_flags:
            if flags[flag]:
                self._wake()
                return

    def _wait_past(self, word_index: int, seen_cursor: int, deadline_at: float) -> int | None:
        """Wait until the owner of a word moves its cursor on from `seen_cursor`; return where to.

        Looks for a while first, then sleeps: steps 4 to 8. Returns None when the deadline passed. Raises
        QueueClosedError when the owner has closed, or the peer is dead, and its cursor stands still: what it wrote
        last is never lost.
        """
        cells = self._cells
        word = self._spin(word_index, seen_cursor)
        if word == seen_cursor:
            began_at = time.monotonic()
            if self._membarrier is not None:
                self._flags[self._own_flag] = 1
                self._membarrier.issue()
            try:
                while (word := cells[word_index]) == seen_cursor:
                    # Asked before the last look, so that nothing published before the death is missed.
                    if not self._is_peer_alive() and cells[word_index] == seen_cursor:
                        raise QueueClosedError("the other side of the ring is gone")
                    remaining_s = deadline_at - time.monotonic()
                    if remaining_s <= 0:
                        return None
                    self._num_waits += 1
                    address = self._words.address(word_index)
                    self._futex.wait(address, seen_cursor, min(remaining_s, WAIT_SLICE_S))
            finally:
                if self._membarrier is not None:
                    self._flags[self._own_flag] = 0
            self._learn(time.monotonic() - began_at)
        cursor = word & CURSOR_MASK
        if cursor == seen_cursor:
            raise QueueClosedError("the other side of the ring is closed")
        return cursor

    def _spin(self, word_index: int, seen_cursor: int) -> int:
        """Look at a word for a short while, until it is no longer `seen_cursor`; return what it is.

        Between looks the core is offered to others, so that with more processes than cores nobody is kept from
        running by somebody who looks for its work.
        """
        cells = self._cells
        for _ in range(self._spin_rounds):
            for _ in range(_LOOKS_PER_ROUND):
                if (word := cells[word_index]) != seen_cursor:
                    return word
            os.sched_yield()
        return seen_cursor

    def _learn(self, slept_s: float) -> None:
        """Choose how long to look next time, from how long it was slept after looking in vain.

        What came soon would have been seen by looking a little longer, without the cost of a wake-up on both sides.
        What took long would not, and an end that waits for long things soon hardly looks at all.
        """
        if slept_s < _SHORT_SLEEP_S:
            self._spin_rounds = min(_MAX_SPIN_ROUNDS, self._spin_rounds * 2)
        else:
            self._spin_rounds = max(_MIN_SPIN_ROUNDS, self._spin_rounds // 2)

    def _require_open(self) -> None:
        if self._is_closed:
            raise QueueClosedError("this end of the ring is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
