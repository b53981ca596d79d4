"""NcclGroup: the collectives of ranks with a GPU each: NCCL, and others for sums where they are faster.

Called by: `connect_group`. Where the GPUs can read each other's memory, what is short is summed by
kernels/triton_all_reduce.py, and what is a little longer by torch's kernels over symmetric memory; the limits are those
that `cluster-bench multi-gpu` measured. All ways give all ranks the same bits.

When a peer dies: waits; the executor sees the death first, and ends the replica.
"""

import logging

import torch
import torch.distributed as dist

from .peer_memory import PeerAccessError, PeerMemory
from .process_group import GROUP_TIMEOUT, ProcessGroupBackedGroup
from .step_measures import GATHER, ExchangeKernels
from .symmetric_memory import KERNEL_NAMES as SYMMETRIC_KERNEL_NAMES
from .symmetric_memory import SymmetricMemory, SymmetricMemoryError

log = logging.getLogger(__name__)

ONE_SHOT_MAX_BYTES = {2: 512 << 10, 4: 256 << 10, 8: 128 << 10}
"""By number of ranks, how long a sum may be that each rank makes for itself. It reads size × bytes, NCCL's ring
2 × bytes. Measured for 2 (launch/bench/results/2x-h200-multi-gpu-2026-11.md); for 4 and 8 reckoned from those bytes,
never measured. Other sizes: NCCL."""
TWO_SHOT_BYTES = {2: (1536 << 10, 8 << 20)}
"""By number of ranks, from and up to what length each rank sums its share, and reads the others'; measured, as above.
Elsewhere: NCCL."""
NCCL_SUM_KERNELS = ("ncclDevKernel_AllReduce", "ncclKernel_AllReduce")
NCCL_GATHER_KERNELS = ("ncclDevKernel_AllGather", "ncclKernel_AllGather")
"""What a profiler calls NCCL's kernels, those of today and those before NCCL 2.19."""


class OneShot:
    """The sum of short tensors in one kernel. All ranks make one, at the same time.

    Raises as PeerMemory; ImportError without Triton.
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int, device: torch.device) -> None:
        # Here, not above: without a GPU there need not be a Triton.
        from .kernels import triton_all_reduce as kernel

        self._kernel = kernel
        self._rank = rank
        self._memory = PeerMemory(
            store, rank=rank, size=size, num_bytes=kernel.memory_bytes(size), device=device
        )
        self._addresses = torch.tensor(self._memory.addresses, dtype=torch.int64, device=device)
        self._counts = torch.zeros(kernel.MAX_PIECES, dtype=torch.int32, device=device)
        self.max_bytes = kernel.MAX_BYTES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place. x: contiguous, at most `max_bytes`."""
        self._kernel.one_shot_all_reduce(x, x, self._addresses, self._counts, rank=self._rank)
        return x

    def close(self) -> None:
        """Let go of the peers' memory. Idempotent."""
        self._memory.close()

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """What a profiler calls the kernel."""
        return self._kernel.KERNEL_NAMES


class NcclGroup(ProcessGroupBackedGroup):
    """See the module. one_shot, symmetric: None: not for these ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        one_shot: OneShot | None = None,
        one_shot_max_bytes: int = 0,
        symmetric: SymmetricMemory | None = None,
        two_shot_min_bytes: int = 0,
    ) -> None:
        ways = [*(["one-shot"] if one_shot else []), *(["two-shot"] if symmetric else [])]
        super().__init__(group, name=", ".join(["nccl", *ways]))
        self.one_shot = one_shot
        self.symmetric = symmetric
        self._two_shot_min_bytes = two_shot_min_bytes
        self._one_shot_max_bytes = 0 if one_shot is None else min(one_shot_max_bytes, one_shot.max_bytes)

    @property
    def can_be_recorded(self) -> bool:
        return True

    @property
    def exchange_kernels(self) -> ExchangeKernels:
        """By way, what a profiler calls the kernels of all exchanges that this group has."""
        return {
            **({"one-shot": self.one_shot.kernel_names} if self.one_shot is not None else {}),
            **({"two-shot": SYMMETRIC_KERNEL_NAMES} if self.symmetric is not None else {}),
            "nccl": NCCL_SUM_KERNELS,
            GATHER: NCCL_GATHER_KERNELS,
        }

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.one_shot is not None and x.nbytes <= self._one_shot_max_bytes and x.is_floating_point():
            return self.one_shot.all_reduce(x)
        if self.symmetric is not None and x.nbytes >= self._two_shot_min_bytes and self.symmetric.can_sum(x):
            return self.symmetric.two_shot(x)
        return super().all_reduce(x)

    def all_reduce_by_nccl(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks through NCCL at any length, to compare."""
        return super().all_reduce(x)

    def close(self) -> None:
        super().close()
        if self.one_shot is not None:
            self.one_shot.close()
        if self.symmetric is not None:
            self.symmetric.close()


def connect_nccl(store: dist.Store, *, rank: int, size: int, device: torch.device) -> NcclGroup:
    """Meet the other ranks in `store`. Blocks until all are there, at most GROUP_TIMEOUT."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = GROUP_TIMEOUT
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    max_bytes = ONE_SHOT_MAX_BYTES.get(size, 0)
    one_shot = None
    if max_bytes:
        try:
            one_shot = OneShot(store, rank=rank, size=size, device=device)
        except (PeerAccessError, ImportError) as error:
            log.warning("short sums go through NCCL: %s", error)
    symmetric = None
    two_shot_min_bytes, two_shot_max_bytes = TWO_SHOT_BYTES.get(size, (0, 0))
    if two_shot_max_bytes:
        try:
            symmetric = SymmetricMemory(
                store, rank=rank, size=size, device=device, max_bytes=two_shot_max_bytes
            )
        except SymmetricMemoryError as error:
            log.warning("longer sums go through NCCL: %s", error)
    made = NcclGroup(
        group,
        one_shot=one_shot,
        one_shot_max_bytes=max_bytes,
        symmetric=symmetric,
        two_shot_min_bytes=two_shot_min_bytes,
    )
    # The first collective makes NCCL connect: a failure belongs to the start, not to the first long request.
    made.all_reduce_by_nccl(torch.zeros(1, device=device))
    return made
