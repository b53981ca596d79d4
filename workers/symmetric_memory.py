"""Sums over ranks by torch's kernels over symmetric memory: a buffer on each GPU that all ranks map.

Called by: nccl_group.py, once, at the start; collective_timing.py. The kernels find buffer and peers by the name of a
process group, so one is registered under a name of its own; of it they want store, rank and size. NVLink multicast is
not used: these kernels read and write the peers' buffers one by one.

When a peer dies: a kernel waits, as NCCL's does; the executor sees the death first, and ends the replica.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .agreement import Agreement

KERNEL_NAMES = ("two_shot_all_reduce_kernel", "one_shot_all_reduce_kernel")
"""What a profiler calls the kernels; the copies into the buffer and out of it are kernels of their own."""
_ALIGNMENT = 16
"""Bytes that a kernel moves at once; each rank's share of a sum must be whole ones."""
_numbers = itertools.count()


class SymmetricMemoryError(Exception):
    """This torch, driver or pair of GPUs does not have it."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn what says that something is missing into a SymmetricMemoryError."""
    try:
        yield
    # Each says it in a way of its own: an operator, a driver's call, a binding.
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise SymmetricMemoryError(str(error).partition("\n")[0] or type(error).__name__) from error


class SymmetricMemory:
    """A buffer of `max_bytes` on each rank. All ranks make one, at the same time.

    Raises SymmetricMemoryError, on all ranks or none.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, size: int, device: torch.device, max_bytes: int
    ) -> None:
        self.max_bytes = max_bytes
        self._size = size
        self._name = f"phalanx-symmetric-memory-{next(_numbers)}"
        store = dist.PrefixStore(self._name, store)
        self._group = dist.ProcessGroup(store, rank, size)
        c10d._register_process_group(self._name, self._group)
        try:
            self._buffer = self._make(store, rank, size, device)
        except BaseException:
            self.close()
            raise

    def _make(self, store: dist.Store, rank: int, size: int, device: torch.device) -> torch.Tensor:
        """Allocate, and map the peers' buffers. Raises on all ranks or none, each for the first that has a problem."""
        memory = c10d._SymmetricMemory
        with Agreement(store, "allocated", rank, size, SymmetricMemoryError), _refusing():
            memory.set_group_info(self._name, rank, size, store)
            buffer: torch.Tensor = memory.empty_strided_p2p(
                (self.max_bytes,), (1,), torch.uint8, device, self._name
            )
        with Agreement(store, "mapped", rank, size, SymmetricMemoryError), _refusing():
            memory.rendezvous(buffer)
        return buffer

    def can_sum(self, x: torch.Tensor) -> bool:
        """Whether the kernels take such a tensor: float32 or bfloat16, in equal shares, and not too long."""
        return (
            x.dtype in (torch.float32, torch.bfloat16)
            and x.nbytes <= self.max_bytes
            and x.nbytes % (_ALIGNMENT * self._size) == 0
        )

    def two_shot(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place: each rank sums its share, and reads the others'. x: contiguous, `can_sum`."""
        shared = self._copy_in(x)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._name)
        return x.copy_(shared)

    def one_shot(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place: each rank reads all of the others. x: contiguous, `can_sum`."""
        shared = self._copy_in(x)
        return x.copy_(torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._name))

    def close(self) -> None:
        """Take the group out of torch's list. Idempotent."""
        if self._group is not None:
            self._group = None
            c10d._unregister_process_group(self._name)

    def _copy_in(self, x: torch.Tensor) -> torch.Tensor:
        return self._buffer[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
