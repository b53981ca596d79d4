"""TimedGroup: the collectives of another group, timed on the host while that is asked for.

Called by: measured_worker.py, in place of a group whose collectives block the host (shared memory, gloo). What only
launches kernels is timed by a profiler instead.

When a peer dies: as the group inside.
"""

import time
from collections.abc import Sequence

import torch

from .step_measures import SumTime
from .tp_group import TensorParallelGroup


class TimedGroup:
    """See TensorParallelGroup. group: what does the work; owned."""

    can_be_recorded = False

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group = group
        self.name = group.name
        self.rank = group.rank
        self.size = group.size
        self._sums: list[SumTime] | None = None
        self._gather_us = 0.0

    def begin(self) -> None:
        """Time what comes from now on."""
        self._sums, self._gather_us = [], 0.0

    def end(self) -> tuple[list[SumTime], float]:
        """Time no more; return the sums, and the microseconds in other exchanges."""
        sums, self._sums = self._sums or [], None
        return sums, self._gather_us

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._sums is None:
            return self._group.all_reduce(x)
        began_at = time.perf_counter()
        summed = self._group.all_reduce(x)
        # Nothing else runs on this rank's thread meanwhile.
        self._sums.append(SumTime(self.name, 1e6 * (time.perf_counter() - began_at), 0.0))
        return summed

    def all_gather_last_dim(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        began_at = time.perf_counter()
        gathered = self._group.all_gather_last_dim(x, sizes)
        self._gather_us += 1e6 * (time.perf_counter() - began_at)
        return gathered

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._group.reduce_scatter(x, sizes)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return self._group.broadcast(x, source)

    def barrier(self) -> None:
        self._group.barrier()

    def close(self) -> None:
        self._group.close()
