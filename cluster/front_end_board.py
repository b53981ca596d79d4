"""FrontEndBoard: what front ends must know of each other at once, before any message could say it.

Called by: each front end, in its event loop, writes its own row and reads the others'; the supervisor makes the table,
and clears the row of a front end that has ended. Rows are numbers in shared memory (shm/number_table.py).

What it is for: connections are accepted where there are fewest (launch/server/acceptor.py); what others have sent and
no report counts yet is part of a replica's load (load_book.py); nobody is blamed for the loss of a replica to which
others had just sent something too, and suspects of several front ends are tried one at a time (suspects.py).
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple

from ..shm.number_table import NumberTable
from .admin import MAX_REPLICAS

_CONNECTIONS, _ACCEPTS, _TRIAL, _FIRST_UNCLEAR = range(4)
_EPOCH, _COUNT, _EPOCH_BEFORE, _COUNT_BEFORE = range(4)
_WORDS_PER_REPLICA = 4
_FIRST_UNREPORTED = _FIRST_UNCLEAR + MAX_REPLICAS * _WORDS_PER_REPLICA
_NOWHERE_YET = 1
"""A trial is about to begin. A larger number: two more than the dp_rank where it is held."""


class Unreported(NamedTuple):
    """What must be added to a replica's last report for the requests of a front end; negative: it has ended since.

    prefill_tokens: still to be prefilled; num_requests: waiting and running; num_tokens: in the KV cache or about to be
    """

    prefill_tokens: float = 0.0
    num_requests: float = 0.0
    num_tokens: float = 0.0


_NUM_UNREPORTED = len(Unreported._fields)
NUM_COLUMNS = _FIRST_UNREPORTED + MAX_REPLICAS * _NUM_UNREPORTED


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

    @property
    def is_alone(self) -> bool:
        """True when there are no others."""
        return not self._others

    def set_unreported(self, dp_rank: int, unreported: Unreported) -> None:
        """Say what must be added to that replica's report for our requests."""
        first = _FIRST_UNREPORTED + dp_rank * _NUM_UNREPORTED
        for place, value in enumerate(unreported):
            self._table.set(self._row, first + place, value)

    def unreported_elsewhere(self, num_replicas: int) -> Sequence[tuple[float, float, float]]:
        """The same of all others together, for each of the first replicas; empty when there are no others.

        Each is an `Unreported` but for its type: this is read for each decision.
        """
        if not self._others:
            return ()
        count = num_replicas * _NUM_UNREPORTED
        sums, *more = (self._table.part(row, _FIRST_UNREPORTED, count) for row in self._others)
        for numbers in more:
            sums = list(map(operator.add, sums, numbers))
        return list(zip(sums[0::3], sums[1::3], sums[2::3], strict=True))

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
