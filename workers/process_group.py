"""ProcessGroupBackedGroup: collectives through a process group of torch, NCCL's or gloo's.

Called by: `connect_group`; nccl_group.py builds on it.

When a peer dies: gloo raises a RuntimeError at once (its socket closes), NCCL waits.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.distributed_c10d import AllgatherOptions

GROUP_TIMEOUT = timedelta(minutes=10)
"""Longer than any step's deadline: the executor's own clock decides, this one only ends what nobody watches."""
LOOPBACK = "lo"
"""The ranks of a replica live on one host."""


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

    @property
    def can_be_recorded(self) -> bool:
        return False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        staged = self._stage(x)
        options = dist.AllreduceOptions()
        options.asyncOp = False
        _wait(self._live().allreduce([staged], options))
        return self._unstage(staged, x)

    def all_gather_last_dim(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        largest = max(sizes)
        staged = self._stage(x if x.shape[-1] == largest else F.pad(x, (0, largest - x.shape[-1])))
        # [size, rows, largest]
        parts = staged.new_empty((self._size, *staged.shape))
        options = AllgatherOptions()
        options.asyncOp = False
        _wait(self._live()._allgather_base(parts.view(-1), staged.view(-1), options))
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
        options.asyncOp = False
        _wait(self._live().broadcast([staged], options))
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


def _wait(work: dist.Work | None) -> None:
    """Wait for a collective that is not to be asynchronous (`asyncOp`).

    NCCL has put such a one on the current stream, and returns nothing to wait for; gloo has a thread of its own.
    """
    if work is not None:
        work.wait()


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
