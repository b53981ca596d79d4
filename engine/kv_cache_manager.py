"""Block tables of the running requests: what the prefix cache gives, what is added, what is given back.

Called by: Scheduler, for each request it schedules. Lives in the engine-core process only.
Invariant: a request's table holds the blocks of all its computed tokens, in order, no block twice; tables
only grow until they are freed as a whole.

A full block is published when the step that computes its last token is scheduled, or a little later: as soon
as all its tokens are known, and the request asks for room again or ends. So a request scheduled later in the
same step may already hit it. That is sound because in each layer the workers write the keys and values of the
whole step before any of its attention, and compute the steps in their order.
"""

import functools
from collections.abc import Iterable, Sequence

from .block_hash import extend_block_hashes
from .block_pool import BlockPool, KVCacheBlock
from .kv_events import BlockStored, KVEventLog
from .prefix_log import PrefixLog
from .request import Request


class KVCacheManager:
    """Owner of the block pool and of all block tables of a replica.

    events, prefix_log: told of every block that can be hit, or no longer; None: nobody listens
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        events: KVEventLog | None = None,
        prefix_log: PrefixLog | None = None,
    ) -> None:
        self.block_size = block_size
        self.shares_prefixes = enable_prefix_caching
        self._pool = BlockPool(num_blocks, events, prefix_log)
        self._is_told = events is not None
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_published: dict[str, int] = {}

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when one request has all blocks."""
        return self._pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Part of the blocks that running requests hold; 0 when idle, whatever is cached."""
        return self._pool.usage

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out, evictable cached ones included."""
        return self._pool.num_free_blocks

    @property
    def num_blocks(self) -> int:
        """All blocks but the null block."""
        return self._pool.num_blocks

    @property
    def cached_hashes(self) -> Iterable[bytes]:
        """The hashes of all blocks that a new request could hit."""
        return self._pool.cached_hashes

    def get_block_ids(self, request_id: str) -> list[int]:
        """Return the block table of an admitted request."""
        return [block.block_id for block in self._tables[request_id]]

    def num_slots(self, request_id: str) -> int:
        """Tokens that the blocks of an admitted request have room for."""
        return len(self._tables[request_id]) * self.block_size

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """Find the longest prefix of `request` in the cache, at most all tokens but one.

        One token must be computed, or there would be nothing to sample from. No side effects.
        """
        if not self.shares_prefixes:
            return []
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        hits = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self._pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def has_room_for(self, request: Request, hits: Sequence[KVCacheBlock], num_spare_blocks: int) -> bool:
        """Say whether all tokens known of a waiting request fit, and leave `num_spare_blocks` free."""
        num_new = self._num_blocks_for(request.num_tokens) - len(hits)
        return num_new + _num_free(hits) + num_spare_blocks <= self._pool.num_free_blocks

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hits: Sequence[KVCacheBlock] = ()
    ) -> list[int] | None:
        """Give `request` room for `num_new_tokens` tokens beyond its computed ones.

        hits: of `get_computed_blocks`, at admission; request.num_computed_tokens counts them already.
        Returns the ids of the newly taken blocks (hits left out), or None when there are not enough free
        ones; nothing has changed then, and the scheduler may preempt and ask again.
        """
        table = self._tables.get(request.request_id)
        assert table is None or not hits, "hits come at admission only"
        num_held = len(table) if table is not None else len(hits)
        num_total_tokens = request.num_computed_tokens + num_new_tokens
        num_needed = max(0, self._num_blocks_for(num_total_tokens) - num_held)
        if num_needed + _num_free(hits) > self._pool.num_free_blocks:
            return None
        if table is None:
            # Hits leave the free list first, or allocate could hand out one of them.
            self._pool.touch(hits)
            table = self._tables[request.request_id] = list(hits)
            self._num_published[request.request_id] = len(hits)
        new_blocks = self._pool.allocate(num_needed)
        table.extend(new_blocks)
        request.num_slots = len(table) * self.block_size
        self._publish(request, table, num_total_tokens)
        return [block.block_id for block in new_blocks]

    def publish(self, request: Request) -> None:
        """Let others find all full blocks of a request that is about to end, if it holds any."""
        table = self._tables.get(request.request_id)
        if table is not None:
            self._publish(request, table, request.num_computed_tokens)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, the last one first: tails are evicted before their heads.

        A request that holds nothing is no error.
        """
        request.num_slots = 0
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            del self._num_published[request.request_id]
            self._pool.free(reversed(table))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while any request holds blocks."""
        return self._pool.reset_cache()

    def check_invariants(self) -> None:
        """Raise AssertionError when tables and pool disagree. For tests and debugging."""
        self._pool.check_invariants()
        num_refs: dict[int, int] = {}
        blocks: dict[int, KVCacheBlock] = {}
        for table in self._tables.values():
            ids = [block.block_id for block in table]
            assert len(ids) == len(set(ids)), "a block stands twice in one table"
            for block in table:
                num_refs[block.block_id] = num_refs.get(block.block_id, 0) + 1
                blocks[block.block_id] = block
        assert all(blocks[block_id].num_refs == count for block_id, count in num_refs.items())
        assert len(num_refs) + self._pool.num_free_blocks == self._pool.num_blocks
        assert self._tables.keys() == self._num_published.keys()

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _publish(self, request: Request, table: list[KVCacheBlock], num_computed_after: int) -> None:
        if not self.shares_prefixes:
            return
        num_full = min(num_computed_after, request.num_tokens) // self.block_size
        first = self._num_published[request.request_id]
        if num_full <= first:
            return
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        for index in range(first, num_full):
            describe = (
                functools.partial(_describe, request, index, self.block_size) if self._is_told else None
            )
            self._pool.publish(table[index], request.block_hashes[index], describe)
        self._num_published[request.request_id] = num_full


def _describe(request: Request, index: int, block_size: int) -> BlockStored:
    return BlockStored(
        block_hash=request.block_hashes[index],
        parent_hash=request.block_hashes[index - 1] if index else None,
        token_ids=request.token_ids[index * block_size : (index + 1) * block_size],
        extra_keys=list(request.extra_keys) if index == 0 else [],
    )


def _num_free(blocks: Sequence[KVCacheBlock]) -> int:
    """Count hits that nobody uses: taking them takes them out of the free list."""
    return sum(block.num_refs == 0 for block in blocks)
