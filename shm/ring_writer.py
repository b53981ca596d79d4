"""RingWriter: the writing end of a ring.

Called by: channel.py and oversize.py; the ring as a whole: ring_buffer.py.

A record goes behind the one before it, in a few steps as long as nothing else has to be seen to (`_clear_end`): the
end of the ring, readers that are behind, and the rewinding. An empty ring is rewound: the writer fills the rest with
padding and goes on at the beginning, so that small records move in memory that is mapped and in cache already, however
large the ring is.

When a reader dies: a wait for room raises QueueClosedError within WAIT_SLICE_S.
"""

import os
from collections.abc import Callable
from types import TracebackType

from .errors import MessageTooLargeError, QueueTimeoutError, RingFullError
from .ring_end import RingEnd, RingStats, always_alive
from .ring_layout import CURSOR_MASK, HEADER_BYTES, PADDING, RECORD, reader_word
from .segment import SharedSegment

_REWIND_BYTES = 256 << 10
"""How far an often empty ring is filled before it is rewound: a part of a core's second-level cache."""


class RingWriter(RingEnd):
    """The writing end. One thread.

    is_peer_alive: asked while waiting for room; False means that a reader is gone for good
    doorbell_fd:   eventfd to ring after each publication, for a reader that waits for many rings
    """

    __slots__ = (
        "_begun_cursor",
        "_begun_offset",
        "_clear_end",
        "_doorbell_fd",
        "_offset",
        "_oldest",
        "_reader_words",
        "_rewind_at",
    )

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
        self._offset = self._cursor % self.capacity
        # Up to here in the data a record may go as it is: there is room, and nothing else to see to.
        self._clear_end = 0
        self._begun_cursor = 0
        self._begun_offset = 0

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
        data = self.data
        for buffer in buffers:
            if not isinstance(buffer, bytes):
                buffer = buffer.cast("B")
            end = position + len(buffer)
            data[position:end] = buffer
            position = end
        self._publish(num_bytes)

    def write_bytes(self, record: bytes, deadline_at: float | None = None) -> None:
        """As `write` with one buffer, in fewer steps."""
        num_bytes = len(record)
        start = self._begin(num_bytes, deadline_at)
        self.data[start : start + num_bytes] = record
        self._publish(num_bytes)

    def reserve(self, num_bytes: int, *, deadline_at: float | None = None) -> "Reservation":
        """Give a writable view of `num_bytes` to fill in a `with` block; publish it at the block's end.

        When the block raises, nothing is published. Entering raises as `write`.
        """
        return Reservation(self, num_bytes, deadline_at)

    def close(self) -> None:
        """See RingEnd."""
        self._clear_end = 0
        super().close()

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
        return self._stats(self._cursor - self._slowest_cursor())

    def check_invariants(self) -> None:
        """Raise AssertionError when a cursor is where it cannot be."""
        assert self._cells[self._own] == self._cursor
        for released in map(self._released, range(self.num_readers)):
            assert released <= self._cursor <= released + self.capacity

    def _begin(self, num_bytes: int, deadline_at: float | None) -> int:
        """Wait for room and write the header; return where in `data` the record's bytes go."""
        offset = self._offset
        end = offset + HEADER_BYTES + (num_bytes + 7 & ~7)
        if end <= self._clear_end:
            self._begun_offset = end
            self._begun_cursor = self._cursor + end - offset
        else:
            offset = self._make_room(num_bytes, deadline_at)
        self._headers[offset >> 3] = RECORD | num_bytes
        return offset + HEADER_BYTES

    def _make_room(self, num_bytes: int, deadline_at: float | None) -> int:
        """Find a place for a record, and wait until it is free; return its offset. Raises as `write`."""
        self._require_open()
        if num_bytes > self.max_record_bytes:
            raise MessageTooLargeError(num_bytes, self.max_record_bytes)
        capacity, cursor = self.capacity, self._cursor
        offset = cursor % capacity
        taken = HEADER_BYTES + (num_bytes + 7 & ~7)
        padding = 0
        if offset + taken > capacity or (
            offset >= self._rewind_at and taken <= offset and self._may_rewind(offset)
        ):
            padding = capacity - offset
        end = cursor + padding + taken
        if self._oldest < end - capacity:
            self._wait_released(end - capacity, f"for {padding + taken} bytes", deadline_at)
        if padding:
            self._headers[offset >> 3] = PADDING | padding - HEADER_BYTES
            self._rewind_at = _REWIND_BYTES
            # Known again once something is published there.
            self._clear_end = 0
            offset = 0
        else:
            self._clear_end = min(
                self._rewind_at,
                capacity,
                offset + self._oldest + capacity - cursor,
                offset + HEADER_BYTES + self.max_record_bytes,
            )
        self._begun_offset = offset + taken
        self._begun_cursor = end
        return offset

    def _publish(self, num_bytes: int) -> None:
        """Publish the record of `num_bytes` that was begun."""
        self._offset = self._begun_offset
        self._advance(self._begun_cursor, num_bytes)
        if self._doorbell_fd is not None:
            os.eventfd_write(self._doorbell_fd, 1)

    def _may_rewind(self, offset: int) -> bool:
        if self.read_position() == self._cursor:
            return True
        # Not asked again at once: it costs a look at every reader's line.
        self._rewind_at = offset + _REWIND_BYTES
        return False

    def _released(self, reader: int) -> int:
        return self._cells[self._reader_words[reader]] & CURSOR_MASK

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
        self._view = writer.data[position : position + self._num_bytes]
        return self._view

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.release()
        if kind is None:
            self._writer._publish(self._num_bytes)
