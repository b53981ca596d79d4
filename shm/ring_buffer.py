"""A ring of variable-size records in shared memory: one writer, 1 to 16 readers, everyone reads everything.

Called by: the executor (writes steps, reads replies) and the workers (read steps, write replies); each end is
used by one thread. One copy in, none out: a reader decodes from a view of the ring and then lets it go.

Layout, each line 64 bytes: geometry (constant) | writer | reader 0 | ... | reader N-1 | data.
A line of the writer or of a reader holds three words, written by its owner alone:

  cursor   bytes that its owner has published or released since the beginning, records and padding
  event    counts publications or releases, and the closing: the word that the other side sleeps on
  closed   1 once its owner has closed

A record is an 8-byte header (length, what it is) and its bytes, padded to 8. A record does not wrap: when it
does not fit before the end, a padding record fills the rest. A record takes at most half of the ring, so that
it fits an empty ring wherever that stands.

Invariants: reader cursor <= writer cursor <= reader cursor + capacity, for every reader; cursors are multiples
of 8 and never go back. The data between a reader's cursor and the writer's is not touched by the writer.

No wake-up is lost: who waits loads `event`, then looks at `cursor` and `closed`, then sleeps only while `event`
is unchanged; who publishes stores `cursor`, then `event`, then always wakes. What happens in between changes
`event`, and the sleep ends at once.

When the peer dies: a wait looks every 0.25 s at `is_peer_alive` and raises QueueClosedError. What was published
before can still be read.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from .errors import (
    MessageTooLargeError,
    ProtocolError,
    QueueClosedError,
    QueueEmptyError,
    QueueTimeoutError,
    RingFullError,
)
from .ordering import CACHE_LINE_BYTES, WORD_BYTES, Futex, Words, map_words
from .segment import SharedSegment

MAX_READERS = 16
MIN_CAPACITY = 256
WAIT_SLICE_S = 0.25
"""Longest sleep before a wait looks at its peer again."""

_MAGIC = 0x5048_4C58_5249_4E47
_WORDS_PER_LINE = CACHE_LINE_BYTES // WORD_BYTES
_CURSOR, _EVENT, _CLOSED = 0, 1, 2
_HEADER = struct.Struct("<II")
_RECORD, _PADDING = 1, 2
_MIN_SPIN_S = 2e-6
_MAX_SPIN_S = 60e-6


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


def ring_bytes(capacity: int, num_readers: int) -> int:
    """Return the size of the segment that a ring of `capacity` data bytes needs."""
    return (2 + num_readers) * CACHE_LINE_BYTES + capacity


def create_ring(name: str, *, capacity: int, num_readers: int) -> SharedSegment:
    """Make a segment and write the geometry of an empty ring into it.

    capacity: data bytes, rounded up to a multiple of 64. Raises TransportError when there is no memory.
    """
    if not 1 <= num_readers <= MAX_READERS:
        raise ValueError(f"a ring has 1 to {MAX_READERS} readers, not {num_readers}")
    capacity = max(MIN_CAPACITY, -(-capacity // CACHE_LINE_BYTES) * CACHE_LINE_BYTES)
    segment = SharedSegment.create(name, ring_bytes(capacity, num_readers))
    words = map_words(segment.buffer[:CACHE_LINE_BYTES])
    words.store(1, capacity)
    words.store(2, num_readers)
    words.store(0, _MAGIC)
    words.close()
    return segment


def max_record_bytes(capacity: int) -> int:
    """Return the largest record that a ring of `capacity` takes."""
    return capacity // 2 - _HEADER.size


class _RingEnd:
    """What both ends share: the mapped lines, and the wait. Owns the segment."""

    def __init__(
        self, segment: SharedSegment, own_line: int | None, is_peer_alive: Callable[[], bool]
    ) -> None:
        self._segment = segment
        head = map_words(segment.buffer[:CACHE_LINE_BYTES])
        magic, self.capacity, self.num_readers = head.load(0), head.load(1), head.load(2)
        head.close()
        if magic != _MAGIC or segment.size != ring_bytes(self.capacity, self.num_readers):
            raise ProtocolError("the segment does not hold a ring")
        if own_line is not None and not 0 <= own_line < self.num_readers:
            raise ValueError(f"reader {own_line} of {self.num_readers}")
        lines_bytes = (2 + self.num_readers) * CACHE_LINE_BYTES
        self._words: Words = map_words(segment.buffer[:lines_bytes])
        self._data = segment.buffer[lines_bytes:]
        self._is_peer_alive = is_peer_alive
        self._futex = Futex()
        self._own = (1 if own_line is None else 2 + own_line) * _WORDS_PER_LINE
        self._cursor = self._words.load(self._own + _CURSOR)
        self._event = self._words.load(self._own + _EVENT)
        self._spin_s = _MIN_SPIN_S
        self._is_closed = False
        self._num_records = 0
        self._num_bytes = 0
        self._num_waits = 0

    @property
    def max_record_bytes(self) -> int:
        """The largest record that this ring takes."""
        return max_record_bytes(self.capacity)

    def _advance(self, cursor: int) -> None:
        """Make `cursor` visible to the other side, and wake it."""
        self._cursor = cursor
        self._words.store(self._own + _CURSOR, cursor)
        self._signal()

    def _signal(self) -> None:
        self._event += 1
        self._words.store(self._own + _EVENT, self._event)
        self._futex.wake(self._words.address(self._own + _EVENT))

    def _wait_past(self, line: int, seen_cursor: int, deadline_at: float) -> bool:
        """Wait until the owner of `line` moves its cursor on from `seen_cursor`.

        Returns False when the deadline passed. Raises QueueClosedError when the owner has closed, or the peer
        is dead, and its cursor stands still: what it wrote last is never lost.
        """
        words, cursor_index = self._words, line + _CURSOR
        began_at = time.monotonic()
        spin_until = began_at + self._spin_s
        while True:
            if words.load(cursor_index) != seen_cursor:
                # It came while this end was awake: staying awake a little longer next time pays.
                self._spin_s = min(_MAX_SPIN_S, self._spin_s * 2)
                return True
            if time.monotonic() >= spin_until:
                break
        self._spin_s = max(_MIN_SPIN_S, self._spin_s / 2)
        while True:
            event = words.load(line + _EVENT)
            is_closed = words.load(line + _CLOSED) != 0 or not self._is_peer_alive()
            # Looked at after the closing: who closes publishes first, so nothing can be missed in between.
            if words.load(cursor_index) != seen_cursor:
                return True
            if is_closed:
                raise QueueClosedError("the other side of the ring is closed or gone")
            remaining_s = deadline_at - time.monotonic()
            if remaining_s <= 0:
                return False
            self._num_waits += 1
            self._futex.wait(words.address(line + _EVENT), event, min(remaining_s, WAIT_SLICE_S))

    def _require_open(self) -> None:
        if self._is_closed:
            raise QueueClosedError("this end of the ring is closed")

    def close(self) -> None:
        """Tell the other side that this end is done, and unmap. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._words.store(self._own + _CLOSED, 1)
        self._signal()
        self._words.close()
        self._data.release()
        self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _always_alive() -> bool:
    return True


class RingWriter(_RingEnd):
    """The writing end. One thread.

    is_peer_alive: asked while waiting for room; False means that a reader is gone for good
    doorbell_fd:   eventfd to ring after each publication, for a reader that waits for many rings
    """

    def __init__(
        self,
        segment: SharedSegment,
        *,
        is_peer_alive: Callable[[], bool] = _always_alive,
        doorbell_fd: int | None = None,
    ) -> None:
        super().__init__(segment, None, is_peer_alive)
        self._doorbell_fd = doorbell_fd
        self._lines = [(2 + reader) * _WORDS_PER_LINE for reader in range(self.num_readers)]
        self._oldest = min(self._words.load(line + _CURSOR) for line in self._lines)

    def write(self, *buffers: bytes | memoryview, deadline_at: float | None = None) -> None:
        """Publish one record made of `buffers`, one after the other.

        deadline_at: instant of time.monotonic() until which to wait for room; None: do not wait.
        Raises MessageTooLargeError; RingFullError (None) or QueueTimeoutError (deadline), naming the slowest
        reader; QueueClosedError when the reader waited for has closed or died. Nothing is published then.
        """
        sizes = [len(buffer) if isinstance(buffer, bytes) else buffer.nbytes for buffer in buffers]
        with self.reserve(sum(sizes), deadline_at=deadline_at) as view:
            position = 0
            for buffer, size in zip(buffers, sizes, strict=True):
                view[position : position + size] = buffer if isinstance(buffer, bytes) else buffer.cast("B")
                position += size

    @contextmanager
    def reserve(self, num_bytes: int, *, deadline_at: float | None = None) -> Iterator[memoryview]:
        """Give a writable view of `num_bytes` to fill; publish it at the end of the block.

        When the block raises, nothing is published. Raises as `write`.
        """
        self._require_open()
        if num_bytes > self.max_record_bytes:
            raise MessageTooLargeError(num_bytes, self.max_record_bytes)
        taken = _HEADER.size + -(-num_bytes // WORD_BYTES) * WORD_BYTES
        offset = self._cursor % self.capacity
        padding = self.capacity - offset if offset + taken > self.capacity else 0
        self._wait_for_room(padding + taken, deadline_at)
        if padding:
            _HEADER.pack_into(self._data, offset, padding - _HEADER.size, _PADDING)
            offset = 0
        _HEADER.pack_into(self._data, offset, num_bytes, _RECORD)
        view = self._data[offset + _HEADER.size : offset + _HEADER.size + num_bytes]
        try:
            yield view
        finally:
            view.release()
        self._num_records += 1
        self._num_bytes += num_bytes
        self._advance(self._cursor + padding + taken)
        if self._doorbell_fd is not None:
            os.eventfd_write(self._doorbell_fd, 1)

    def slowest_reader(self) -> int:
        """Return the index of the reader that has released least."""
        return min(
            range(self.num_readers), key=lambda reader: self._words.load(self._lines[reader] + _CURSOR)
        )

    def stats(self) -> RingStats:
        """Return counters and fill of this end."""
        return RingStats(
            capacity=self.capacity,
            num_readers=self.num_readers,
            num_records=self._num_records,
            num_bytes=self._num_bytes,
            num_waits=self._num_waits,
            used_bytes=self._cursor - min(self._words.load(line + _CURSOR) for line in self._lines),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when a cursor is where it cannot be."""
        assert self._words.load(self._own + _CURSOR) == self._cursor
        for line in self._lines:
            released = self._words.load(line + _CURSOR)
            assert released % WORD_BYTES == 0
            assert released <= self._cursor <= released + self.capacity

    def _wait_for_room(self, num_bytes: int, deadline_at: float | None) -> None:
        limit = self._cursor + num_bytes - self.capacity
        if self._oldest >= limit:
            return
        for reader, line in enumerate(self._lines):
            while (released := self._words.load(line + _CURSOR)) < limit:
                if deadline_at is None:
                    raise RingFullError(f"no room for {num_bytes} bytes: reader {reader} is behind")
                if not self._wait_past(line, released, deadline_at):
                    raise QueueTimeoutError(
                        f"no room for {num_bytes} bytes: reader {reader} did not read in time"
                    )
        self._oldest = min(self._words.load(line + _CURSOR) for line in self._lines)


class RingReader(_RingEnd):
    """One reading end, number `index`. One thread; one record at a time.

    is_peer_alive: asked while waiting for a record; False means that the writer is gone for good
    """

    def __init__(
        self, segment: SharedSegment, index: int, *, is_peer_alive: Callable[[], bool] = _always_alive
    ) -> None:
        super().__init__(segment, index, is_peer_alive)
        self._is_reading = False

    @contextmanager
    def read(self, *, deadline_at: float | None = None) -> Iterator[memoryview]:
        """Give a read-only view of the next record; release it at the end of the block, also when that raises.

        The view and what is cut from it must not be used afterwards: the writer overwrites the bytes.

        deadline_at: instant of time.monotonic() until which to wait; None: do not wait.
        Raises QueueEmptyError (None) or QueueTimeoutError (deadline); QueueClosedError when the writer closed
        or died and everything has been read.
        """
        self._require_open()
        assert not self._is_reading, "one record at a time"
        self._skip_padding(deadline_at)
        offset = self._cursor % self.capacity
        num_bytes, kind = _HEADER.unpack_from(self._data, offset)
        taken = _HEADER.size + -(-num_bytes // WORD_BYTES) * WORD_BYTES
        if kind != _RECORD or offset + taken > self.capacity:
            raise ProtocolError(f"the ring holds no record at {offset}")
        view = self._data[offset + _HEADER.size : offset + _HEADER.size + num_bytes].toreadonly()
        self._is_reading = True
        try:
            yield view
        finally:
            self._is_reading = False
            self._num_records += 1
            self._num_bytes += num_bytes
            view.release()
            self._advance(self._cursor + taken)

    def stats(self) -> RingStats:
        """Return counters and fill of this end."""
        return RingStats(
            capacity=self.capacity,
            num_readers=self.num_readers,
            num_records=self._num_records,
            num_bytes=self._num_bytes,
            num_waits=self._num_waits,
            used_bytes=self._words.load(_WORDS_PER_LINE + _CURSOR) - self._cursor,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when a cursor is where it cannot be."""
        written = self._words.load(_WORDS_PER_LINE + _CURSOR)
        # Behind by the padding, while the record after it is being read.
        assert self._words.load(self._own + _CURSOR) <= self._cursor
        assert self._cursor % WORD_BYTES == 0
        assert self._cursor <= written <= self._cursor + self.capacity

    def _skip_padding(self, deadline_at: float | None) -> None:
        """Wait for a record, and step over the padding that may stand before it.

        Padding is published together with the record behind it, so there is nothing to wait for in between.
        """
        if self._words.load(_WORDS_PER_LINE + _CURSOR) == self._cursor:
            if deadline_at is None:
                self._raise_if_finished()
                raise QueueEmptyError("the ring is empty")
            if not self._wait_past(_WORDS_PER_LINE, self._cursor, deadline_at):
                raise QueueTimeoutError("nothing came through the ring in time")
        offset = self._cursor % self.capacity
        num_bytes, kind = _HEADER.unpack_from(self._data, offset)
        if kind == _PADDING:
            # Only this end's own count: the writer learns of it with the record's release.
            self._cursor += _HEADER.size + num_bytes

    def _raise_if_finished(self) -> None:
        if self._words.load(_WORDS_PER_LINE + _CLOSED) == 0:
            return
        if self._words.load(_WORDS_PER_LINE + _CURSOR) == self._cursor:
            raise QueueClosedError("the writer closed the ring")
