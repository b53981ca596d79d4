"""ShmGroup: the collectives of ranks on one host's CPU, through shared memory.

Called by: `connect_group`, which chooses it once, at the start; then as any TensorParallelGroup. One thread.

Every sum is ((rank 0 + rank 1) + rank 2) + ..., in float32 where the tensors are of 16 bits: the bits depend
neither on timing nor on which rank is asked. A message longer than a slot goes in pieces, each an exchange of its
own; the two slots of a rank let one piece be written while slower peers read the piece before.

A short sum takes one exchange: everybody reads everything. A long one of three ranks or more takes two: each rank
sums its slice of all, then reads the slices of the others, so that each element is summed once and not by all.
For two ranks the first way moves less memory at any length.

When a peer dies: CollectiveError within a second, from the arena.
"""

import os
from collections.abc import Sequence

import torch

from ..shm.collective_arena import Collective, CollectiveArena
from ..shm.segment import SharedSegment

MAX_SUMMED_BY_ALL_BYTES = 256 << 10
"""From three ranks on, the longest piece that is summed by every rank for itself."""
_MAX_CACHED_VIEWS = 256
_SLICE_ALIGNMENT = 32

Slots = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
"""Views of one shape: for both halves, those of all ranks."""


def connect_shm(fd: int, *, rank: int, timeout_s: float) -> "ShmGroup":
    """Map the arena that was inherited as `fd`, and meet the other ranks there. Owns `fd` from now on.

    Raises TransportError: no arena, or CollectiveError when a peer does not come.
    """
    arena = CollectiveArena(SharedSegment.attach(fd, os.fstat(fd).st_size), rank, timeout_s=timeout_s)
    arena.meet()
    return ShmGroup(arena)


class ShmGroup:
    """See the module. Owns `arena`, in which all ranks have met."""

    name = "shm"

    def __init__(self, arena: CollectiveArena) -> None:
        self._arena: CollectiveArena | None = arena
        self.rank = arena.rank
        self.size = arena.num_ranks
        self._slot_bytes = arena.slot_bytes
        # [size, 2, slot_bytes]
        self._data = torch.frombuffer(arena.data, dtype=torch.uint8).view(self.size, 2, self._slot_bytes)
        self._views: dict[tuple[torch.dtype, int], Slots] = {}

    @property
    def can_be_recorded(self) -> bool:
        return False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1)
        for piece in self._pieces(flat):
            if self.size > 2 and piece.nbytes > MAX_SUMMED_BY_ALL_BYTES:
                self._sum_by_slices(piece)
            else:
                _sum(self._share(piece, Collective.ALL_REDUCE), piece)
        return x

    def all_gather_last_dim(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        rows, largest = x.shape[0], max(sizes)
        output = x.new_empty((rows, sum(sizes)))
        parts = output.split(list(sizes), dim=-1)
        slot_size = self._slot_bytes // x.element_size()
        # Columns first: rows longer than a slot are rare, and cut.
        for first in range(0, largest, slot_size):
            widths = [max(0, min(size - first, slot_size)) for size in sizes]
            rows_at_once = slot_size // max(widths)
            for row in range(0, rows, rows_at_once):
                num_rows = min(rows_at_once, rows - row)
                piece = x[row : row + num_rows, first : first + widths[self.rank]]
                slots = self._share(piece, Collective.ALL_GATHER, num_elements=num_rows * max(widths))
                for part, slot, width in zip(parts, slots, widths, strict=True):
                    if width:
                        part[row : row + num_rows, first : first + width] = slot[: num_rows * width].view(
                            num_rows, width
                        )
        return output

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        flat = x.view(-1)
        row_size = x[0].numel() if x.shape[0] else 0
        start = sum(sizes[: self.rank]) * row_size
        output = x.new_empty((sizes[self.rank], *x.shape[1:]))
        own = output.view(-1)
        first = 0
        for piece in self._pieces(flat):
            slots = self._share(piece, Collective.REDUCE_SCATTER)
            low, high = max(first, start), min(first + piece.numel(), start + own.numel())
            if low < high:
                _sum([slot[low - first : high - first] for slot in slots], own[low - start : high - start])
            first += piece.numel()
        return output

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        for piece in self._pieces(x.view(-1)):
            arena = self._live()
            slots = self._slots(piece.dtype, piece.numel())[arena.half]
            if self.rank == source:
                slots[source].copy_(piece)
            arena.exchange(Collective.BROADCAST, piece.nbytes)
            if self.rank != source:
                piece.copy_(slots[source])
        return x

    def barrier(self) -> None:
        self._live().exchange(Collective.BARRIER, 0)

    def close(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            # Views of the segment keep it mapped.
            self._views.clear()
            del self._data
            arena.close()

    def _sum_by_slices(self, piece: torch.Tensor) -> None:
        slots = self._share(piece, Collective.ALL_REDUCE)
        arena = self._live()
        slice_size = -(-piece.numel() // (self.size * _SLICE_ALIGNMENT)) * _SLICE_ALIGNMENT
        targets = piece.split(slice_size)
        sums = self._slots(piece.dtype, piece.numel())[arena.half]
        # Few elements may leave nothing for the last ranks.
        if self.rank < len(targets):
            own = targets[self.rank]
            _sum([slot.split(slice_size)[self.rank] for slot in slots], own)
            sums[self.rank].split(slice_size)[self.rank].copy_(own)
        arena.exchange(Collective.ALL_REDUCE, piece.nbytes)
        for rank, target in enumerate(targets):
            if rank != self.rank:
                target.copy_(sums[rank].split(slice_size)[rank])

    def _share(
        self, piece: torch.Tensor, kind: Collective, *, num_elements: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Exchange `piece`; return the flat slots of all ranks, valid until the next exchange.

        num_elements: length of the slots, where ranks bring different amounts
        """
        arena = self._live()
        num_elements = piece.numel() if num_elements is None else num_elements
        slots = self._slots(piece.dtype, num_elements)[arena.half]
        own = slots[self.rank]
        if piece.numel() == num_elements and piece.dim() == 1:
            own.copy_(piece)
        elif piece.numel():
            own[: piece.numel()].view(piece.shape).copy_(piece)
        arena.exchange(kind, num_elements * piece.element_size())
        return slots

    def _pieces(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        if flat.nbytes <= self._slot_bytes:
            return (flat,) if flat.numel() else ()
        return flat.split(self._slot_bytes // flat.element_size())

    def _slots(self, dtype: torch.dtype, num_elements: int) -> Slots:
        views = self._views.get((dtype, num_elements))
        if views is None:
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            num_bytes = num_elements * dtype.itemsize
            even, odd = (
                tuple(self._data[rank, half, :num_bytes].view(dtype) for rank in range(self.size))
                for half in (0, 1)
            )
            views = self._views[dtype, num_elements] = (even, odd)
        return views

    def _live(self) -> CollectiveArena:
        assert self._arena is not None, "the group was closed"
        return self._arena


def _sum(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add the parts in their order into `out`, which is none of them.

    Two parts of 16 bits need no wider accumulator: their sum is computed in float32 and rounded once.
    """
    if len(parts) == 2 or not out.dtype.is_floating_point or out.dtype.itemsize >= 4:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return
    wide = parts[0].float()
    for part in parts[1:]:
        wide.add_(part)
    out.copy_(wide)
