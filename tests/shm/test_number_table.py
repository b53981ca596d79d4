"""Numbers of several writers in one table."""

import os

import pytest

from phalanx.shm.errors import TransportError
from phalanx.shm.number_table import NumberTable


def test_every_writer_has_its_row_and_everyone_reads_all() -> None:
    table = NumberTable.create("test", 2, 3)
    other = NumberTable.attach(os.dup(table.fd), 2, 3)

    table.set(0, 1, 0.5)
    other.add(1, 1, 2)
    other.add(1, 1, 2)

    assert table.column(1) == other.column(1) == [0.5, 4.0]
    assert [table.column(0), table.column(2)] == [[0.0, 0.0], [0.0, 0.0]]
    assert other.part(1, 0, 3) == [0.0, 4.0, 0.0]
    assert other.part(0, 1, 1) == [0.5]
    assert other.part(0, 1, 0) == []
    with pytest.raises(IndexError):
        other.part(0, 2, 2)
    table.clear(1)
    assert other.column(1) == [0.5, 0.0]
    other.close()
    other.close()
    table.close()
    with pytest.raises(ValueError, match="released"):
        table.get(0, 0)


@pytest.mark.parametrize(("row", "column"), [(-1, 0), (0, -1), (2, 0), (0, 3)])
def test_a_place_beyond_the_table_is_an_error(row: int, column: int) -> None:
    table = NumberTable.private(2, 3)

    with pytest.raises(IndexError, match=f"row {row}, column {column}"):
        table.get(row, column)


def test_a_table_of_another_size_is_refused() -> None:
    table = NumberTable.create("test", 2, 3)
    fd = os.dup(table.fd)
    with pytest.raises(TransportError, match="48 bytes"):
        NumberTable.attach(fd, 3, 3)
    os.close(fd)
    table.close()
