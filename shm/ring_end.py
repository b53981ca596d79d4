"""What the two ends of a ring share: the mapped lines, making a cursor known, and the wait for the other side's.

Called by: ring_buffer.py; one thread per end. Whoever publishes (a writer a record, a reader the room that it gives
back) does the same three steps, and whoever waits the same four, so that one argument covers both directions.

  publish                              wait
    1  store cursor   (release)          5  load event    (acquire)
    2  store event    (release)          6  load closed   (acquire), ask whether the peer lives
    3  wake           (system call)      7  load cursor   (acquire); it moved: done; closed: raise
  close: store closed, then 2 and 3      8  sleep unless event has changed (system call)

No wake-up is lost: if the cursor that 7 saw is old, then 2 had not been seen by 5 (else, by the order of 1 and 2 and
of 5 and 7, the new cursor would have been). Then either the kernel sees a changed event in 8 and does not sleep, or it
queued the sleeper before it looked at the word, and 3, which stands behind 2, finds it in the queue. That last "or"
is the kernel's: each of the two system calls has a full barrier between its write (event; the queue) and its read
(the queue; event). This is why publishing always makes the system call: a flag "somebody sleeps" in plain memory
would need that barrier too, and there is none to be had from here that costs less.

What each machine needs for 1, 2, 5, 6, 7 stands in ordering.py. tests/support/ring_model.py is this list as a program
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
    CURSOR,
    EVENT,
    MAGIC,
    WRITER_LINE,
    lines_bytes,
    max_record_bytes,
    reader_line,
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

    own_line: index of the reader, or None for the writer
    """

    def __init__(
        self, segment: SharedSegment, own_line: int | None, is_peer_alive: Callable[[], bool]
    ) -> None:
        head = map_words(segment.buffer[:CACHE_LINE_BYTES])
        magic, self.capacity, self.num_readers = head.load(0), head.load(1), head.load(2)
        head.close()
        if magic != MAGIC or segment.size != ring_bytes(self.capacity, self.num_readers):
            raise ProtocolError("the segment does not hold a ring")
        if own_line is not None and not 0 <= own_line < self.num_readers:
            raise ValueError(f"reader {own_line} of {self.num_readers}")
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
        self._own = WRITER_LINE if own_line is None else reader_line(own_line)
        self._own_cursor = self._own + CURSOR
        self._own_event = self._own + EVENT
        self._wake = self._futex.waker(self._words.address(self._own_event))
        self._cursor = self._load(self._own_cursor)
        self._event = self._load(self._own_event)
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
        self._store(self._own + CLOSED, 1)
        self._store(self._own_event, self._event + 1)
        self._wake()
        self._words.close()
        self._headers.release()
        self._data.release()
        self._segment.close()

    def _advance(self, cursor: int) -> None:
        """Make `cursor` visible to the other side, and wake it: steps 1 to 3."""
        self._cursor = cursor
        self._event = event = self._event + 1
        store = self._store
        store(self._own_cursor, cursor)
        store(self._own_event, event)
        self._wake()

    def _wait_past(self, line: int, seen_cursor: int, deadline_at: float) -> bool:
        """Wait until the owner of `line` moves its cursor on from `seen_cursor`.

        Looks for a while first, then sleeps: steps 5 to 8. Returns False when the deadline passed. Raises
        QueueClosedError when the owner has closed, or the peer is dead, and its cursor stands still: what it wrote
        last is never lost.
        """
        if self._spin(line + CURSOR, seen_cursor):
            return True
        load = self._load
        began_at = time.monotonic()
        while True:
            event = load(line + EVENT)
            is_closed = load(line + CLOSED) != 0 or not self._is_peer_alive()
            # Looked at after the closing: who closes publishes first, so nothing can be missed in between.
            if load(line + CURSOR) != seen_cursor:
                self._learn(time.monotonic() - began_at)
                return True
            if is_closed:
                raise QueueClosedError("the other side of the ring is closed or gone")
            remaining_s = deadline_at - time.monotonic()
            if remaining_s <= 0:
                return False
            self._num_waits += 1
            self._futex.wait(self._words.address(line + EVENT), event, min(remaining_s, WAIT_SLICE_S))

    def _spin(self, cursor_index: int, seen_cursor: int) -> bool:
        """Look at a cursor for a short while; True when it moved.

        Between looks the core is offered to others, so that with more processes than cores nobody is kept from
        running by somebody who looks for its work.
        """
        load = self._load
        for _ in range(self._spin_rounds):
            for _ in range(_LOOKS_PER_ROUND):
                if load(cursor_index) != seen_cursor:
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
