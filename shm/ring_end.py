"""What the two ends of a ring share: the mapped lines, making a cursor known, and the wait for the other side's.

Called by: ring_buffer.py; one thread per end. Whoever publishes (a writer a record, a reader the room that it gives
back) does the same two steps, and whoever waits the same two, so that one argument covers both directions.

  publish                              wait
    1  store word    (release)           3  load word    (acquire); its cursor moved: done; closed: raise
    2  wake          (system call)       4  sleep unless the word has changed since (system call)
  close: the same, with the bit for "closed" set beside the cursor

No wake-up is lost: either the kernel sees in 4 what 1 has stored and does not sleep, or it queued the sleeper before
it looked at the word, and 2, which stands behind 1, finds it in the queue. That "or" is the kernel's: each of the two
system calls has a full barrier between its write (the word; the queue) and its read (the queue; the word). This is
why publishing always makes the system call: a flag "somebody sleeps" in plain memory would need that barrier too, and
there is none to be had from here that costs less. And a closing is never seen before the last record: they are one
word.

What each machine needs for 1 and 3 stands in ordering.py. tests/support/ring_model.py is this list as a program
for a model of both machines, and breaks when any of it is left out.

When the peer dies: a wait looks every 0.25 s at `is_peer_alive` and raises QueueClosedError. What was published
before can still be read.
"""

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from .errors import ProtocolError, QueueClosedError
from .ordering import CACHE_LINE_BYTES, Futex, Words, map_words
from .ring_layout import (
    CLOSED,
    CURSOR_MASK,
    MAGIC,
    WRITER_WORD,
    lines_bytes,
    max_record_bytes,
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


def always_alive() -> bool:
    """Say that the peer lives; for who learns of its death in another way."""
    return True


class RingEnd:
    """One end of a ring. Owns the segment.

    reader: index of this reader, or None for the writer
    """

    def __init__(self, segment: SharedSegment, reader: int | None, is_peer_alive: Callable[[], bool]) -> None:
        head = map_words(segment.buffer[:CACHE_LINE_BYTES])
        magic, self.capacity, self.num_readers = head.load(0), head.load(1), head.load(2)
        head.close()
        if magic != MAGIC or segment.size != ring_bytes(self.capacity, self.num_readers):
            raise ProtocolError("the segment does not hold a ring")
        if reader is not None and not 0 <= reader < self.num_readers:
            raise ValueError(f"reader {reader} of {self.num_readers}")
        num_line_bytes = lines_bytes(self.num_readers)
        self.max_record_bytes = max_record_bytes(self.capacity)
        self._segment = segment
        self._words: Words = map_words(segment.buffer[:num_line_bytes])
        # Bound once: an attribute and a method are a third of what a load costs.
        self._load = self._words.load
        self._store = self._words.store
        self._data = segment.buffer[num_line_bytes:]
        self._headers = self._data.cast("Q")
        self._is_peer_alive = is_peer_alive
        self._futex = Futex()
        self._own = WRITER_WORD if reader is None else reader_word(reader)
        self._wake = self._futex.waker(self._words.address(self._own))
        self._cursor = self._load(self._own) & CURSOR_MASK
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
        self._store(self._own, self._cursor | CLOSED)
        self._wake()
        self._words.close()
        self._headers.release()
        self._data.release()
        self._segment.close()

    def _advance(self, cursor: int) -> None:
        """Make `cursor` visible to the other side, and wake it: steps 1 and 2."""
        self._cursor = cursor
        self._store(self._own, cursor)
        self._wake()

    def _wait_past(self, word_index: int, seen_cursor: int, deadline_at: float) -> int | None:
        """Wait until the owner of a word moves its cursor on from `seen_cursor`; return where to.

        Looks for a while first, then sleeps: steps 3 and 4. Returns None when the deadline passed. Raises
        QueueClosedError when the owner has closed, or the peer is dead, and its cursor stands still: what it wrote
        last is never lost.
        """
        load = self._load
        if not self._spin(word_index, seen_cursor):
            began_at = time.monotonic()
            while load(word_index) == seen_cursor:
                # Asked before the last look, so that nothing published before the death is missed.
                if not self._is_peer_alive() and load(word_index) == seen_cursor:
                    raise QueueClosedError("the other side of the ring is gone")
                remaining_s = deadline_at - time.monotonic()
                if remaining_s <= 0:
                    return None
                self._num_waits += 1
                address = self._words.address(word_index)
                self._futex.wait(address, seen_cursor, min(remaining_s, WAIT_SLICE_S))
            self._learn(time.monotonic() - began_at)
        cursor = load(word_index) & CURSOR_MASK
        if cursor == seen_cursor:
            raise QueueClosedError("the other side of the ring is closed")
        return cursor

    def _spin(self, word_index: int, seen_cursor: int) -> bool:
        """Look at a word for a short while; True when it changed.

        Between looks the core is offered to others, so that with more processes than cores nobody is kept from
        running by somebody who looks for its work.
        """
        load = self._load
        for _ in range(self._spin_rounds):
            for _ in range(_LOOKS_PER_ROUND):
                if load(word_index) != seen_cursor:
                    return True
            os.sched_yield()
        return False

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
