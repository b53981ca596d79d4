"""RingReader: a reading end of a ring.

Called by: channel.py; the ring as a whole: ring_buffer.py.

When the writer dies: a wait for a record raises QueueClosedError within WAIT_SLICE_S, after everything was read.
"""

from collections.abc import Callable
from types import TracebackType

from .errors import ProtocolError, QueueClosedError, QueueEmptyError, QueueTimeoutError
from .ordering import WORD_BYTES
from .ring_end import RingEnd, RingStats, always_alive
from .ring_layout import CLOSED, CURSOR_MASK, HEADER_BYTES, PADDING, RECORD, WRITER_WORD
from .segment import SharedSegment


class RingReader(RingEnd):
    """One reading end, number `index`. One thread; one record at a time.

    is_peer_alive: asked while waiting for a record; False means that the writer is gone for good
    """

    __slots__ = (
        "_published",
        "_read_bytes",
        "_read_end",
        "_view",
        "index",
    )

    def __init__(
        self, segment: SharedSegment, index: int, *, is_peer_alive: Callable[[], bool] = always_alive
    ) -> None:
        super().__init__(segment, index, is_peer_alive)
        self.index = index
        self.data = self.data.toreadonly()
        # Not read again while something is known to be there: the line belongs to the writer's core.
        self._published = self._cursor
        self._view: memoryview | None = None
        self._read_bytes = 0
        self._read_end = 0

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
        start, end = self.locate(deadline_at)
        self._view = view = self.data[start:end]
        return view

    def locate(self, deadline_at: float | None) -> tuple[int, int]:
        """As `acquire`, but return where in `data` the record begins and ends. For who cuts it into pieces."""
        cursor = self._cursor
        if self._is_closed:
            self._require_open()
        assert self._read_end == 0, "one record at a time"
        if self._published == cursor:
            word = self._cells[WRITER_WORD]
            if word == cursor or word & CLOSED:
                word = self._await_record(deadline_at)
            self._published = word
        capacity = self.capacity
        offset = cursor % capacity
        header = self._headers[offset >> 3]
        start = offset + HEADER_BYTES
        num_bytes = header - RECORD
        if not 0 <= num_bytes <= capacity - start:
            if header != (PADDING | capacity - start):
                raise ProtocolError(f"the ring holds no record at {offset}")
            # Padding is published together with the record behind it, so there is nothing to wait for. Only this
            # end's own count: the writer learns of it with the record's release.
            cursor += capacity - offset
            self._cursor = cursor
            start = HEADER_BYTES
            num_bytes = self._headers[0] - RECORD
            if not 0 <= num_bytes <= capacity - start:
                raise ProtocolError("the ring holds no record at 0")
        self._read_bytes = num_bytes
        self._read_end = cursor + HEADER_BYTES + (num_bytes + 7 & ~7)
        return start, start + num_bytes

    def release(self) -> None:
        """End the read: the writer may overwrite the record. The view cannot be used any more.

        What was cut from it (an array, a tensor) can, and shows later records then: it must be gone or copied.
        """
        end = self._read_end
        assert end, "nothing is being read"
        if self._view is not None:
            self._view.release()
            self._view = None
        self._read_end = 0
        self._advance(end, self._read_bytes)

    def put_back(self) -> None:
        """End the read without having read: the next one gives the same record."""
        self._read_end = 0
        if self._view is not None:
            self._view.release()
            self._view = None

    def has_writer(self) -> bool:
        """False once the writer has closed or died. For who waits for it elsewhere."""
        return self._cells[WRITER_WORD] & CLOSED == 0 and self._is_peer_alive()

    def stats(self) -> RingStats:
        """Return counters and fill of this end."""
        return self._stats(self._written() - self._cursor)

    def check_invariants(self) -> None:
        """Raise AssertionError when a cursor is where it cannot be."""
        # Behind by the padding, while the record after it is being read.
        assert self._cells[self._own] <= self._cursor
        assert self._cursor % WORD_BYTES == 0
        assert self._cursor <= self._published <= self._written() <= self._cursor + self.capacity

    def _written(self) -> int:
        return self._cells[WRITER_WORD] & CURSOR_MASK

    def _await_record(self, deadline_at: float | None) -> int:
        """Return the writer's cursor when it is past this end's."""
        if deadline_at is not None:
            written = self._wait_past(WRITER_WORD, self._cursor, deadline_at)
            if written is None:
                raise QueueTimeoutError("nothing came through the ring in time")
            return written
        word = self._cells[WRITER_WORD]
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
