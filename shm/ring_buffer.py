"""A ring of variable-size records in shared memory: one writer, 1 to 16 readers, everyone reads everything.

Called by: the executor (writes steps, reads replies) and the workers (read steps, write replies); each end is
used by one thread. One copy in, none out: a reader decodes from a view of the ring and then lets it go.
ring_layout.py has the memory, ring_end.py how the ends wait for each other.

Invariants: reader cursor <= writer cursor <= reader cursor + capacity, for every reader; cursors are multiples
of 8 and never go back. The data between a reader's cursor and the writer's is not touched by the writer.

An empty ring is rewound: the writer fills the rest with padding and goes on at the beginning, so that small records
move in memory that is mapped and in cache already, however large the ring is.

When the peer dies: a wait raises QueueClosedError within WAIT_SLICE_S. What was published before can still be read.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from .errors import (
    MessageTooLargeError,
    ProtocolError,
    QueueClosedError,
    QueueEmptyError,
    QueueTimeoutError,
    RingFullError,
)
from .ordering import WORD_BYTES
from .ring_end import WAIT_SLICE_S, RingEnd, always_alive
from .ring_layout import (
    CLOSED,
    CURSOR_MASK,
    HEADER_BYTES,
    MAX_READERS,
    PADDING,
    RECORD,
    WRITER_WORD,
    create_ring,
    max_record_bytes,
    reader_word,
    ring_bytes,
)
from .segment import SharedSegment

__all__ = [
    "MAX_READERS",
    "WAIT_SLICE_S",
    "RingReader",
    "RingStats",
    "RingWriter",
    "create_ring",
    "max_record_bytes",
    "ring_bytes",
]

_REWIND_BYTES = 256 << 10
"""How far an often empty ring is filled before it is rewound: a part of a core's second-level cache."""


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


class RingWriter(RingEnd):
    """The writing end. One thread.

    is_peer_alive: asked while waiting for room; False means that a reader is gone for good
    doorbell_fd:   eventfd to ring after each publication, for a reader that waits for many rings
    """

    def __init__(
        self,
        segment: SharedSegment,
        *,
        is_peer_alive: Callable[[], bool] = always_alive,
        doorbell_fd: int | None = None,
    ) -> None:
        super().__init__(segment, None, is_peer_alive)
        self._doorbell_fd = doorbell_fd
        self._reader_words = [reader_word(reader) for reader in range(self.num_readers)]
        self._oldest = self._slowest_cursor()
        self._rewind_at = _REWIND_BYTES
        self._begun_end = 0

    def write(self, *buffers: bytes | memoryview, deadline_at: float | None = None) -> None:
        """Publish one record made of `buffers`, one after the other.

        deadline_at: instant of time.monotonic() until which to wait for room; None: do not wait.
        Raises MessageTooLargeError; RingFullError (None) or QueueTimeoutError (deadline), naming the slowest
        reader; QueueClosedError when the reader waited for has closed or died. Nothing is published then.
        """
        num_bytes = 0
        for buffer in buffers:
            num_bytes += len(buffer) if isinstance(buffer, bytes) else buffer.nbytes
        position = self._begin(num_bytes, deadline_at)
        data = self._data
        for buffer in buffers:
            if not isinstance(buffer, bytes):
                buffer = buffer.cast("B")
            end = position + len(buffer)
            data[position:end] = buffer
            position = end
        self._advance(self._begun_end, num_bytes)
        if self._doorbell_fd is not None:
            os.eventfd_write(self._doorbell_fd, 1)

    def reserve(self, num_bytes: int, *, deadline_at: float | None = None) -> "Reservation":
        """Give a writable view of `num_bytes` to fill in a `with` block; publish it at the block's end.

        When the block raises, nothing is published. Entering raises as `write`.
        """
        return Reservation(self, num_bytes, deadline_at)

    @property
    def position(self) -> int:
        """Everything written up to now; what `wait_read` takes."""
        return self._cursor

    def read_position(self) -> int:
        """Return up to where every reader has released."""
        self._oldest = self._slowest_cursor()
        return self._oldest

    def wait_read(self, position: int, *, deadline_at: float | None = None) -> None:
        """Wait until every reader has released all that was written up to `position`.

        Raises as `write`; RingFullError when there is no deadline and a reader is behind.
        """
        self._require_open()
        self._wait_released(position, f"up to {position}", deadline_at)

    def slowest_reader(self) -> int:
        """Return the index of the reader that has released least."""
        return min(range(self.num_readers), key=self._released)

    def stats(self) -> RingStats:
        """Return counters and fill of this end."""
        return RingStats(
            capacity=self.capacity,
            num_readers=self.num_readers,
            num_records=self._num_records,
            num_bytes=self._num_bytes,
            num_waits=self._num_waits,
            used_bytes=self._cursor - self._slowest_cursor(),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when a cursor is where it cannot be."""
        assert self._load(self._own) == self._cursor
        for released in map(self._released, range(self.num_readers)):
            assert released <= self._cursor <= released + self.capacity

    def _begin(self, num_bytes: int, deadline_at: float | None) -> int:
        """Wait for room and write the header; return where in `_data` the record's bytes go."""
        if self._is_closed:
            self._require_open()
        if num_bytes > self.max_record_bytes:
            raise MessageTooLargeError(num_bytes, self.max_record_bytes)
        capacity = self.capacity
        taken = HEADER_BYTES + (num_bytes + 7 & ~7)
        offset = self._cursor % capacity
        padding = 0
        if offset + taken > capacity or (
            offset >= self._rewind_at and taken <= offset and self._may_rewind(offset)
        ):
            padding = capacity - offset
        end = self._cursor + padding + taken
        if self._oldest < end - capacity:
            self._wait_released(end - capacity, f"for {padding + taken} bytes", deadline_at)
        if padding:
            self._headers[offset >> 3] = PADDING | padding - HEADER_BYTES
            self._rewind_at = _REWIND_BYTES
            offset = 0
        self._headers[offset >> 3] = RECORD | num_bytes
        self._begun_end = end
        return offset + HEADER_BYTES

    def _publish(self, num_bytes: int) -> None:
        """Publish the record of `num_bytes` that was begun."""
        self._advance(self._begun_end, num_bytes)
        if self._doorbell_fd is not None:
            os.eventfd_write(self._doorbell_fd, 1)

    def _may_rewind(self, offset: int) -> bool:
        if self.read_position() == self._cursor:
            return True
        # Not asked again at once: it costs a look at every reader's line.
        self._rewind_at = offset + _REWIND_BYTES
        return False

    def _released(self, reader: int) -> int:
        return self._load(self._reader_words[reader]) & CURSOR_MASK

    def _slowest_cursor(self) -> int:
        return min(map(self._released, range(self.num_readers)))

    def _wait_released(self, limit: int, what: str, deadline_at: float | None) -> None:
        """Wait until every reader's cursor has come to `limit`."""
        for reader, word_index in enumerate(self._reader_words):
            released = self._released(reader)
            while released < limit:
                if deadline_at is None:
                    raise RingFullError(f"no room {what}: reader {reader} is behind")
                moved_to = self._wait_past(word_index, released, deadline_at)
                if moved_to is None:
                    raise QueueTimeoutError(f"no room {what}: reader {reader} did not read in time")
                released = moved_to
        self._oldest = self._slowest_cursor()


class Reservation:
    """Room in a ring for one record, filled in a `with` block. Made by `RingWriter.reserve`."""

    __slots__ = ("_deadline_at", "_num_bytes", "_view", "_writer")

    def __init__(self, writer: RingWriter, num_bytes: int, deadline_at: float | None) -> None:
        self._writer = writer
        self._num_bytes = num_bytes
        self._deadline_at = deadline_at

    def __enter__(self) -> memoryview:
        writer = self._writer
        position = writer._begin(self._num_bytes, self._deadline_at)
        self._view = writer._data[position : position + self._num_bytes]
        return self._view

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.release()
        if kind is None:
            self._writer._publish(self._num_bytes)


class RingReader(RingEnd):
    """One reading end, number `index`. One thread; one record at a time.

    is_peer_alive: asked while waiting for a record; False means that the writer is gone for good
    """

    def __init__(
        self, segment: SharedSegment, index: int, *, is_peer_alive: Callable[[], bool] = always_alive
    ) -> None:
        super().__init__(segment, index, is_peer_alive)
        self.index = index
        self._data = self._data.toreadonly()
        # Not read again while something is known to be there: the line belongs to the writer's core.
        self._published = self._cursor
        self._view: memoryview | None = None
        self._view_bytes = 0
        self._view_end = 0

    def read(self, *, deadline_at: float | None = None) -> "Reading":
        """Give a read-only view of the next record to a `with` block; release it at the end, also when that raises.

        Entering waits and raises as `acquire`.
        """
        return Reading(self, deadline_at)

    def acquire(self, *, deadline_at: float | None = None) -> memoryview:
        """Return a read-only view of the next record. `release` or `put_back` must follow.

        The view and what is cut from it must not be used afterwards: the writer overwrites the bytes.

        deadline_at: instant of time.monotonic() until which to wait; None: do not wait.
        Raises QueueEmptyError (None) or QueueTimeoutError (deadline); QueueClosedError when the writer closed
        or died and everything has been read.
        """
        cursor = self._cursor
        if self._is_closed:
            self._require_open()
        assert self._view is None, "one record at a time"
        if self._published == cursor:
            word = self._load(WRITER_WORD)
            # Above it also when the writer has closed: then there is nothing to read but the bit.
            self._published = (
                word if word & CLOSED == 0 and word != cursor else self._await_record(deadline_at)
            )
        capacity = self.capacity
        offset = cursor % capacity
        header = self._headers[offset >> 3]
        start = offset + HEADER_BYTES
        if header == (PADDING | capacity - start):
            # Padding is published together with the record behind it, so there is nothing to wait for. Only this
            # end's own count: the writer learns of it with the record's release.
            cursor += capacity - offset
            self._cursor = cursor
            start = HEADER_BYTES
            header = self._headers[0]
        num_bytes = header - RECORD
        if not 0 <= num_bytes <= capacity - start:
            raise ProtocolError(f"the ring holds no record at {start - HEADER_BYTES}")
        self._view_bytes = num_bytes
        self._view_end = cursor + HEADER_BYTES + (num_bytes + 7 & ~7)
        self._view = view = self._data[start : start + num_bytes]
        return view

    def release(self) -> None:
        """End the read: the writer may overwrite the record. The view cannot be used any more.

        What was cut from it (an array, a tensor) can, and shows later records then: it must be gone or copied.
        """
        view = self._view
        assert view is not None, "nothing is being read"
        view.release()
        self._view = None
        self._advance(self._view_end, self._view_bytes)

    def put_back(self) -> None:
        """End the read without having read: the next one gives the same record."""
        if self._view is not None:
            self._view.release()
            self._view = None

    def has_writer(self) -> bool:
        """False once the writer has closed or died. For who waits for it elsewhere."""
        return self._load(WRITER_WORD) & CLOSED == 0 and self._is_peer_alive()

    def stats(self) -> RingStats:
        """Return counters and fill of this end."""
        return RingStats(
            capacity=self.capacity,
            num_readers=self.num_readers,
            num_records=self._num_records,
            num_bytes=self._num_bytes,
            num_waits=self._num_waits,
            used_bytes=self._written() - self._cursor,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when a cursor is where it cannot be."""
        # Behind by the padding, while the record after it is being read.
        assert self._load(self._own) <= self._cursor
        assert self._cursor % WORD_BYTES == 0
        assert self._cursor <= self._published <= self._written() <= self._cursor + self.capacity

    def _written(self) -> int:
        return self._load(WRITER_WORD) & CURSOR_MASK

    def _await_record(self, deadline_at: float | None) -> int:
        """Return the writer's cursor when it is past this end's."""
        if deadline_at is not None:
            written = self._wait_past(WRITER_WORD, self._cursor, deadline_at)
            if written is None:
                raise QueueTimeoutError("nothing came through the ring in time")
            return written
        word = self._load(WRITER_WORD)
        if word & CURSOR_MASK != self._cursor:
            return word & CURSOR_MASK
        if word & CLOSED:
            raise QueueClosedError("the writer closed the ring")
        raise QueueEmptyError("the ring is empty")


class Reading:
    """The read of one record in a `with` block. Made by `RingReader.read`."""

    __slots__ = ("_deadline_at", "_reader")

    def __init__(self, reader: RingReader, deadline_at: float | None) -> None:
        self._reader = reader
        self._deadline_at = deadline_at

    def __enter__(self) -> memoryview:
        return self._reader.acquire(deadline_at=self._deadline_at)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.release()
