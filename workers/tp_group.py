"""TensorParallelGroup: the collectives of one replica's ranks.

Called by: the parallel layers and the Worker, on the worker's main thread. All ranks call the same collectives in
the same order; a rank that leaves one out hangs its peers until the group's timeout.

Every implementation gives all ranks the same bits: each element of a sum is reduced in one place, in one order, and
then copied. The ranks sample for themselves, so a difference in one bit could split them.

Which implementation, is chosen once, at the start: shared memory for CPU ranks (shm_group.py), NCCL for a GPU each,
gloo where the ranks were given no shared memory, or share a GPU.

When a peer dies: shared memory raises a CollectiveError within a second, gloo a RuntimeError at once (its socket
closes), NCCL waits; the executor sees the death first, and ends the replica.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..shm.errors import ConfigError
from .shm_group import connect_shm

GROUP_TIMEOUT = timedelta(minutes=10)
"""Longer than any step's deadline: the executor's own clock decides, this one only ends what nobody watches."""
LOOPBACK = "lo"
"""The ranks of a replica live on one host."""


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


class ProcessGroupBackedGroup:
    """Collectives through a torch process group of our own; nothing is registered globally.

    through_host: tensors are copied to the host for the exchange. For ranks that share one GPU, which NCCL refuses.
    """

    def __init__(self, group: dist.ProcessGroup, *, name: str, through_host: bool = False) -> None:
        self.name = name
        self._group: dist.ProcessGroup | None = group
        self._rank = group.rank()
        self._size = group.size()
        self._through_host = through_host

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        staged = self._stage(x)
        self._live().allreduce([staged]).wait()
        return self._unstage(staged, x)

    def all_gather_last_dim(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        largest = max(sizes)
        staged = self._stage(F.pad(x, (0, largest - x.shape[-1])))
        # [size, rows, largest]
        parts = staged.new_empty((self._size, *staged.shape))
        self._live().allgather([list(parts.unbind(0))], [staged]).wait()
        parts = parts.to(x.device)
        return torch.cat(
            [part[..., :size] for part, size in zip(parts.unbind(0), sizes, strict=True)], dim=-1
        )

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        # The parts may be uneven, which the process groups' own reduce-scatter is not made for.
        return self.all_reduce(x.clone()).split(list(sizes))[self._rank]

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        staged = self._stage(x)
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._live().broadcast([staged], options).wait()
        return self._unstage(staged, x)

    def barrier(self) -> None:
        self._live().barrier().wait()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            # A peer may be gone: an orderly shutdown could wait for it for ever.
            group.abort()

    def _live(self) -> dist.ProcessGroup:
        assert self._group is not None, "the group was closed"
        return self._group

    def _stage(self, x: torch.Tensor) -> torch.Tensor:
        return x.cpu() if self._through_host else x

    def _unstage(self, staged: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(staged) if self._through_host else staged


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
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = GROUP_TIMEOUT
        group: TensorParallelGroup = ProcessGroupBackedGroup(
            dist.ProcessGroupNCCL(store, rank, size, options), name="nccl"
        )
    else:
        group = connect_gloo(store, rank=rank, size=size, through_host=device.type == "cuda")
    # The first collective makes NCCL connect: a failure belongs to the start, not to the first request.
    group.all_reduce(torch.zeros(1, device=device))
    return group


def connect_gloo(
    store: dist.Store, *, rank: int, size: int, through_host: bool = False
) -> ProcessGroupBackedGroup:
    """Meet the other ranks in `store` and exchange over the loopback interface."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = GROUP_TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(interface=LOOPBACK)]
    return ProcessGroupBackedGroup(
        dist.ProcessGroupGloo(store, rank, size, options), name="gloo", through_host=through_host
    )
