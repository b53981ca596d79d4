"""TensorParallelGroup: the collectives of one replica's ranks.

Called by: the parallel layers and the Worker, on the worker's main thread. All ranks call the same collectives in
the same order; a rank that leaves one out hangs its peers until the group's timeout.

Every implementation gives all ranks the same bits: each element of a sum is reduced in one place, in one order, and
then copied. The ranks sample for themselves, so a difference in one bit could split them.

Which implementation, is chosen once, at the start: shared memory for CPU ranks (shm_group.py), NCCL for a GPU each
(nccl_group.py), gloo where the ranks were given no shared memory, or share a GPU (process_group.py).

When a peer dies: shared memory raises a CollectiveError within a second, gloo a RuntimeError at once (its socket
closes), NCCL waits; the executor sees the death first, and ends the replica.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ..shm.errors import ConfigError
from .nccl_group import connect_nccl
from .process_group import GROUP_TIMEOUT, connect_gloo
from .shm_group import connect_shm


class TensorParallelGroup(Protocol):
    """Collectives over the ranks of one replica. Blocking as seen from the stream of the calling thread."""

    @property
    def name(self) -> str:
        """What the collectives go through, for reports."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def can_be_recorded(self) -> bool:
        """True when a collective only launches kernels on the current stream, so that a CUDA graph can hold it."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks. The result may be `x` itself, overwritten. x: contiguous, any shape."""
        ...

    def all_gather_last_dim(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Put the ranks' tensors side by side along the last dimension.

        x:       [rows, sizes[rank]], contiguous
        returns  [rows, sum(sizes)]; travels padded to the largest size, since collectives want even parts
        """
        ...

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Sum over the ranks, and keep this rank's rows.

        x:       [sum(sizes), ...], contiguous
        returns  [sizes[rank], ...]
        """
        ...

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrite `x` with that of rank `source`."""
        ...

    def barrier(self) -> None:
        """Return when all ranks are here."""
        ...

    def close(self) -> None:
        """Leave the group. Idempotent; waits for nobody."""
        ...


class SingleRankGroup:
    """A replica of one rank: nothing to exchange."""

    name = "none"
    rank = 0
    size = 1
    can_be_recorded = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather_last_dim(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return


def connect_group(
    *,
    rank: int,
    size: int,
    rendezvous: str | None,
    device: torch.device,
    share_device: bool,
    arena_fd: int | None = None,
) -> TensorParallelGroup:
    """Meet the other ranks. Blocks until all are there, at most GROUP_TIMEOUT.

    rendezvous: the file in which process groups find each other
    arena_fd:   the segment of the ranks' arena, for ranks on CPU; None: they go through gloo
    Raises ConfigError when there are peers and nowhere to meet; RuntimeError or TransportError when they do
    not come.
    """
    if size == 1:
        return SingleRankGroup()
    if device.type == "cpu" and arena_fd is not None:
        return connect_shm(arena_fd, rank=rank, timeout_s=GROUP_TIMEOUT.total_seconds())
    if rendezvous is None:
        raise ConfigError(
            "parallel.tensor_parallel_size", "needs a rendezvous file when there are several ranks"
        )
    store = dist.PrefixStore("tp", dist.FileStore(rendezvous, size))
    if device.type == "cuda" and not share_device:
        group: TensorParallelGroup = connect_nccl(store, rank=rank, size=size, device=device)
    else:
        group = connect_gloo(store, rank=rank, size=size, through_host=device.type == "cuda")
    # What the first collective brings up belongs to the start, not to the first request.
    group.all_reduce(torch.zeros(1, device=device))
    return group
