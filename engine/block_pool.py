"""KV blocks of one replica: who uses which, which are free, and which of the free ones may be reused.

Called by: KVCacheManager. Lives in the engine-core process only.

    free list, least recently used first          in use (num_refs > 0)
    [no hash] [no hash] [hash a] [hash b] ...     blocks of running requests, shared ones counted
     ^ allocate takes here      ^ free puts here

Invariants: every block but the null block is free or in use, never both; a hash is in the map only while
its block carries it; block 0 is the null block: never given out, freed or hashed. A free block keeps its
hash until it is taken for something else.

A second block with the contents of a mapped one stays without a hash: it is the first to be reused.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from .kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventLog
from .prefix_log import PrefixLog

NULL_BLOCK_ID = 0


class KVCacheBlock:
    """One block. Owner: the pool; others hold it as a name."""

    __slots__ = ("block_hash", "block_id", "is_told", "next_free", "num_refs", "prev_free")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.num_refs = 0
        self.block_hash: bytes | None = None
        self.is_told = False
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, num_refs={self.num_refs}, is_hashed={self.block_hash is not None})"


class FreeBlockList:
    """Doubly linked list through the blocks themselves, so that any block leaves it in O(1)."""

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        # Two sentinels, so that no operation has a special case at an end.
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self._len = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the end: it is reused last."""
        assert self._tail.prev_free is not None
        self._insert_after(self._tail.prev_free, block)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put a block at the front: it is reused first."""
        self._insert_after(self._head, block)

    def pop(self) -> KVCacheBlock:
        """Take the block at the front. The list must not be empty."""
        block = self._head.next_free
        assert block is not None
        assert block is not self._tail, "the free list is empty"
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it stands."""
        assert block.prev_free is not None
        assert block.next_free is not None
        block.prev_free.next_free = block.next_free
        block.next_free.prev_free = block.prev_free
        block.prev_free = block.next_free = None
        self._len -= 1

    def _insert_after(self, left: KVCacheBlock, block: KVCacheBlock) -> None:
        assert block.prev_free is None
        assert block.next_free is None
        right = left.next_free
        assert right is not None
        left.next_free = right.prev_free = block
        block.prev_free, block.next_free = left, right
        self._len += 1


class BlockPool:
    """All blocks of a replica's KV cache.

    num_blocks: the null block included; at least 2
    events, prefix_log: told of every hash that comes and goes; None: nobody listens
    """

    def __init__(
        self, num_blocks: int, events: KVEventLog | None = None, prefix_log: PrefixLog | None = None
    ) -> None:
        assert num_blocks >= 2
        self._blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlockList(self._blocks[NULL_BLOCK_ID + 1 :])
        self._by_hash: dict[bytes, KVCacheBlock] = {}
        self.null_block = self._blocks[NULL_BLOCK_ID]
        """Stands in a table where no block is needed."""
        self._events = events
        self._prefix_log = prefix_log

    @property
    def num_blocks(self) -> int:
        """Blocks that can be given out: all but the null block."""
        return len(self._blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody uses, those with reusable contents included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a new request could hit, in use or free."""
        return len(self._by_hash)

    @property
    def cached_hashes(self) -> Iterable[bytes]:
        """The hashes of all blocks that listeners are told of."""
        return (block_hash for block_hash, block in self._by_hash.items() if block.is_told)

    @property
    def usage(self) -> float:
        """Part of the blocks that requests use. [0, 1]"""
        return 1.0 - len(self._free) / self.num_blocks

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """Look up a block by its contents. No side effect: the caller touches what it takes."""
        return self._by_hash.get(block_hash)

    def allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        """Give out blocks, the least recently used first. There must be enough free ones.

        A block that carries a hash loses it here, not earlier.
        """
        blocks = []
        for _ in range(num_blocks):
            block = self._free.pop()
            if block.block_hash is not None:
                del self._by_hash[block.block_hash]
                if block.is_told:
                    if self._events is not None:
                        self._events.record(BlockRemoved(block_hash=block.block_hash))
                    if self._prefix_log is not None:
                        self._prefix_log.record(block.block_hash, False)
                block.block_hash = None
                block.is_told = False
            block.num_refs = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Use blocks that were found by their hash once more; the null block is left alone."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.num_refs == 0:
                self._free.remove(block)
            block.num_refs += 1

    def publish(
        self,
        block: KVCacheBlock,
        block_hash: bytes,
        describe: Callable[[], BlockStored] | None = None,
        *,
        is_told: bool = True,
    ) -> None:
        """Let others find a full block of a running request by its contents.

        describe: says what it holds, asked only when someone listens
        is_told:  listeners hear of it
        """
        assert block.num_refs > 0
        assert block.block_hash is None
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            block.block_hash = block_hash
            block.is_told = is_told
            if not is_told:
                return
            if self._events is not None and describe is not None:
                self._events.record(describe())
            if self._prefix_log is not None:
                self._prefix_log.record(block_hash, True)

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one reference of each block but the null block, in the order in which they shall be reused."""
        for block in blocks:
            if block is self.null_block:
                continue
            assert block.num_refs > 0, f"block {block.block_id} is freed twice"
            block.num_refs -= 1
            if block.num_refs == 0:
                if block.block_hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def reset_cache(self) -> bool:
        """Forget the contents of all blocks. False, and nothing done, while any block is in use."""
        if len(self._free) != self.num_blocks:
            return False
        for block in self._by_hash.values():
            block.block_hash = None
            block.is_told = False
        if self._events is not None and self._by_hash:
            self._events.record(AllBlocksCleared())
        if self._prefix_log is not None and self._by_hash:
            self._prefix_log.record_cleared()
        self._by_hash.clear()
        return True

    def check_invariants(self) -> None:
        """Raise AssertionError when the books are wrong. O(blocks): for tests and debugging."""
        free_ids = [block.block_id for block in self._free]
        assert len(free_ids) == len(set(free_ids)) == len(self._free)
        assert NULL_BLOCK_ID not in free_ids
        in_use_ids = {block.block_id for block in self._blocks if block.num_refs > 0}
        assert in_use_ids.isdisjoint(free_ids)
        assert len(in_use_ids) + len(free_ids) == self.num_blocks
        assert self.null_block.num_refs == 0
        assert self.null_block.block_hash is None
        for block_hash, block in self._by_hash.items():
            assert block.block_hash == block_hash
        assert sum(block.block_hash is not None for block in self._blocks) == len(self._by_hash)
