"""KVEventLog: what the prefix cache of one replica holds, told as a sequence of changes. Pure.

Called by: BlockPool records, EngineCore takes a batch after each step. Whoever follows the batches in the order of
their sequence numbers, from the first one or from a snapshot, knows exactly which block hashes can be hit here.

    sequence   0        1         2                  a follower that has seen 0 and then gets 2 has missed 1:
               stored   stored    removed, stored    it asks `replay(1)`, and starts from `snapshot` when that is
                                                     too long ago

Invariants: sequence numbers have no gap; a batch is never empty; stored and removed alternate for each hash.
"""

from collections import deque
from collections.abc import Iterable

import msgspec


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """A full block can be hit from now on.

    parent_hash: of the block before it; None for the first of a prompt
    token_ids:   its own tokens
    extra_keys:  what else it depends on, as (kind, value); only in the first block of a prompt
    """

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: list[int]
    extra_keys: list[tuple[str, bytes]] = []


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """A block is taken for something else."""

    block_hash: bytes


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """The whole cache was forgotten."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The events between two steps, in their order.

    sequence: one more with each batch of this epoch, from 0
    """

    dp_rank: int
    epoch: int
    sequence: int
    events: list[KVEvent]


class KVEventLog:
    """Collects events, cuts them into batches, and keeps the last ones. Owner: the engine core.

    num_kept: batches that can be replayed
    """

    def __init__(self, *, dp_rank: int, epoch: int, num_kept: int) -> None:
        self._dp_rank = dp_rank
        self._epoch = epoch
        self._open: list[KVEvent] = []
        self._kept: deque[KVEventBatch] = deque(maxlen=num_kept)
        self._next_sequence = 0
        self._stored: dict[bytes, BlockStored] = {}

    @property
    def next_sequence(self) -> int:
        """Number of the next batch."""
        return self._next_sequence

    def record(self, event: KVEvent) -> None:
        """Add an event to the batch that is open."""
        match event:
            case BlockStored():
                assert event.block_hash not in self._stored
                self._stored[event.block_hash] = event
            case BlockRemoved():
                del self._stored[event.block_hash]
            case AllBlocksCleared():
                self._stored.clear()
        self._open.append(event)

    def take_batch(self) -> KVEventBatch | None:
        """Close the batch that is open, and return it. None when nothing has happened."""
        if not self._open:
            return None
        batch = self._make_batch(self._next_sequence, self._open)
        self._next_sequence += 1
        self._open = []
        self._kept.append(batch)
        return batch

    def replay(self, first_sequence: int) -> list[KVEventBatch] | None:
        """Return the closed batches from `first_sequence` on. None when the first of them is not kept any more."""
        if first_sequence >= self._next_sequence:
            return []
        if not self._kept or self._kept[0].sequence > first_sequence:
            return None
        return [batch for batch in self._kept if batch.sequence >= first_sequence]

    def snapshot(self) -> KVEventBatch:
        """Say in one batch what the cache holds after all closed batches. To be followed by batch `next_sequence`.

        Its own sequence is that of the last batch that it contains, -1 when there was none. Call it between two
        steps, right after `take_batch`.
        """
        assert not self._open, "a snapshot must not hold what no batch has told"
        events: list[KVEvent] = [AllBlocksCleared(), *self._stored.values()]
        return self._make_batch(self._next_sequence - 1, events)

    def _make_batch(self, sequence: int, events: list[KVEvent]) -> KVEventBatch:
        return KVEventBatch(dp_rank=self._dp_rank, epoch=self._epoch, sequence=sequence, events=events)


def follow(held: set[bytes], batches: Iterable[KVEventBatch]) -> None:
    """Bring the set of hashes that a replica holds up to date."""
    for batch in batches:
        for event in batch.events:
            match event:
                case BlockStored():
                    held.add(event.block_hash)
                case BlockRemoved():
                    held.discard(event.block_hash)
                case AllBlocksCleared():
                    held.clear()
