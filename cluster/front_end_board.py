"""FrontEndBoard: what front ends must know of each other at once, before any message could say it.

Called by: each front end, in its event loop, writes its own row and reads the others'; the supervisor makes the table,
and clears the row of a front end that has ended. Rows are numbers in shared memory (shm/number_table.py).

What it is for: connections are accepted where there are fewest (launch/server/acceptor.py); requests that no report
counts yet count for the limit of all queues (request_router.py); nobody is blamed for the loss of a replica to which
others had just sent something too, and suspects of several front ends are tried one at a time (replay.py).
"""

from ..shm.number_table import NumberTable
from .admin import MAX_REPLICAS

_CONNECTIONS, _ACCEPTS, _WAITING, _TRIAL, _FIRST_UNCLEAR = range(5)
_EPOCH, _COUNT, _EPOCH_BEFORE, _COUNT_BEFORE = range(4)
_WORDS_PER_REPLICA = 4
NUM_COLUMNS = _FIRST_UNCLEAR + MAX_REPLICAS * _WORDS_PER_REPLICA
_NOWHERE_YET = 1
"""A trial is about to begin. A larger number: two more than the dp_rank where it is held."""


class FrontEndBoard:
    """The view of one front end. table: NUM_COLUMNS columns, a row for each front end."""

    def __init__(self, table: NumberTable, client_index: int) -> None:
        self._table = table
        self._row = client_index
        self._others = [row for row in range(table.num_rows) if row != client_index]

    @classmethod
    def alone(cls) -> "FrontEndBoard":
        """Return the board of a front end that has no others."""
        return cls(NumberTable.private(1, NUM_COLUMNS), 0)

    def set_connections(self, num_connections: int, *, accepts: bool) -> None:
        """Say how many connections we have, and whether we take more."""
        self._table.set(self._row, _CONNECTIONS, num_connections)
        self._table.set(self._row, _ACCEPTS, float(accepts))

    def num_with_fewer(self, num_connections: int) -> int:
        """How many others take connections, and have fewer than that."""
        get = self._table.get
        return sum(
            get(row, _ACCEPTS) > 0 and get(row, _CONNECTIONS) < num_connections for row in self._others
        )

    def set_num_unreported(self, num_requests: int) -> None:
        """Say how many waiting requests the replicas' reports do not count yet; negative: they count too many."""
        self._table.set(self._row, _WAITING, num_requests)

    def num_unreported_elsewhere(self) -> float:
        """The same of all others together."""
        return sum(self._table.get(row, _WAITING) for row in self._others)

    def set_trial(self, dp_rank: int | None) -> None:
        """Say on which replica a suspect of ours is tried; -1: on one that is yet to be chosen. None: on none."""
        self._table.set(self._row, _TRIAL, 0 if dp_rank is None else dp_rank + _NOWHERE_YET + 1)

    def is_trial_elsewhere(self, *, is_ours_on: bool = False) -> bool:
        """True while another's suspect is tried. is_ours_on: that of a later front end must give way to ours."""
        rows = self._others if not is_ours_on else [row for row in self._others if row < self._row]
        return any(self._table.get(row, _TRIAL) > 0 for row in rows)

    def trials_elsewhere(self) -> set[int]:
        """The replicas where suspects of others are tried."""
        marks = (int(self._table.get(row, _TRIAL)) for row in self._others)
        return {mark - _NOWHERE_YET - 1 for mark in marks if mark > _NOWHERE_YET}

    def set_unclear(self, dp_rank: int, epoch: int, num_requests: int) -> None:
        """Say how many of our requests that replica may die of: it has had them, and they have made no token there."""
        table, row, base = self._table, self._row, _FIRST_UNCLEAR + dp_rank * _WORDS_PER_REPLICA
        known = table.get(row, base + _EPOCH)
        if known != epoch + 1:
            # Others may not have heard yet that the life before is over, and will ask for it.
            table.set(row, base + _COUNT_BEFORE, table.get(row, base + _COUNT))
            table.set(row, base + _EPOCH_BEFORE, known)
        table.set(row, base + _COUNT, num_requests)
        table.set(row, base + _EPOCH, epoch + 1)

    def is_unclear_elsewhere(self, dp_rank: int, epoch: int) -> bool:
        """True when others say so of that life of a replica."""
        get, base = self._table.get, _FIRST_UNCLEAR + dp_rank * _WORDS_PER_REPLICA
        for row in self._others:
            for epoch_at, count_at in ((_EPOCH, _COUNT), (_EPOCH_BEFORE, _COUNT_BEFORE)):
                if get(row, base + epoch_at) == epoch + 1 and get(row, base + count_at) > 0:
                    return True
        return False
