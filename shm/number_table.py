"""NumberTable: numbers that some processes write and all of them read, at once: a row for each writer.

Called by: the API servers, for what they count (launch/metrics.py) and for what they must know of each other
(cluster/front_end_board.py). The supervisor creates a table and hands its descriptor down, so a row outlives its
writer: the one that is started in its place goes on with it.
Invariant: at any time a row has one writer; who clears the row of a process has seen its end.

A number is a float64 and is stored by one 8-byte move, so it is never seen half written (see ordering.py). Nothing is
promised of the order in which several of them are seen. Counts are exact up to 2**53.

When the peer dies: its row keeps what it wrote last.
"""

from collections.abc import Sequence
from typing import Self

from .segment import SharedSegment

NUMBER_BYTES = 8


class NumberTable:
    """See above. Any thread may read; `close` is for the last user of the process, and idempotent.

    buffer: num_rows * num_columns * 8 bytes, writable; segment: closed with the table
    Rows and columns beyond the table raise IndexError, every access after `close` ValueError.
    """

    def __init__(
        self, buffer: memoryview, num_rows: int, num_columns: int, segment: SharedSegment | None = None
    ) -> None:
        self.num_rows = num_rows
        self.num_columns = num_columns
        self._numbers = buffer.cast("B").cast("d")
        self._segment = segment

    @classmethod
    def create(cls, name: str, num_rows: int, num_columns: int) -> Self:
        """Reserve a table of zeros to hand to children. Raises TransportError when there is no memory."""
        segment = SharedSegment.create(name, num_rows * num_columns * NUMBER_BYTES)
        return cls(segment.buffer, num_rows, num_columns, segment)

    @classmethod
    def attach(cls, fd: int, num_rows: int, num_columns: int) -> Self:
        """Map a table that was inherited as `fd`, and own that descriptor. Raises TransportError."""
        segment = SharedSegment.attach(fd, num_rows * num_columns * NUMBER_BYTES)
        return cls(segment.buffer, num_rows, num_columns, segment)

    @classmethod
    def private(cls, num_rows: int, num_columns: int) -> Self:
        """Make a table of zeros for this process alone."""
        return cls(memoryview(bytearray(num_rows * num_columns * NUMBER_BYTES)), num_rows, num_columns)

    @property
    def fd(self) -> int:
        """The descriptor to hand to a child. Not of a private table."""
        assert self._segment is not None, "a private table has no descriptor"
        return self._segment.fd

    def get(self, row: int, column: int) -> float:
        """Return one number."""
        return self._numbers[self._index(row, column)]

    def set(self, row: int, column: int, value: float) -> None:
        """Write one number of our own row."""
        self._numbers[self._index(row, column)] = value

    def add(self, row: int, column: int, amount: float) -> None:
        """Add to one number of our own row; one thread."""
        self._numbers[self._index(row, column)] += amount

    def part(self, row: int, first_column: int, num_columns: int) -> Sequence[float]:
        """Return some numbers of one row that stand side by side."""
        if num_columns == 0:
            return []
        first, last = self._index(row, first_column), self._index(row, first_column + num_columns - 1)
        return self._numbers[first : last + 1].tolist()

    def column(self, column: int) -> list[float]:
        """Return what every row has there."""
        return [self.get(row, column) for row in range(self.num_rows)]

    def clear(self, row: int) -> None:
        """Make a row zeros: our own, or one whose writer has ended."""
        for column in range(self.num_columns):
            self.set(row, column, 0.0)

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._numbers.release()
        if self._segment is not None:
            self._segment.close()

    def _index(self, row: int, column: int) -> int:
        if not (0 <= row < self.num_rows and 0 <= column < self.num_columns):
            raise IndexError(f"row {row}, column {column} of {self.num_rows} x {self.num_columns}")
        return row * self.num_columns + column
