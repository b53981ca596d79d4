"""Block tables of the running requests: what the prefix cache gives, what is added, what is given back.

Called by: Scheduler, for each request it schedules. Lives in the engine-core process only.
Invariant: a request's table holds the blocks of all its computed tokens, in order, no block twice. It is one list,
column by column (kv_layout.py): with one KV cache group simply the request's blocks. It only grows until it is freed
as a whole, but the blocks of a group with a window are given back when no query to come sees their tokens.

A prefix is a hit as far as all groups can serve it: a group with a window needs only the blocks that the first
new token sees. A block's key is the hash of its prefix, and its group.

A full block is published when the step that computes its last token is scheduled, or a little later: as soon
as all its tokens are known, and the request asks for room again or ends. So a request scheduled later in the
same step may already hit it. That is sound because in each layer the workers write the keys and values of the
whole step before any of its attention, and compute the steps in their order.

Listeners are told of the first group's blocks. It is one of full attention when there is any: its blocks are the
most that can be hit.
"""

import functools
from collections.abc import Iterable, Sequence

from .block_hash import extend_block_hashes
from .block_pool import BlockPool, KVCacheBlock
from .kv_events import BlockStored, KVEventLog
from .kv_layout import KVLayout
from .prefix_log import PrefixLog
from .request import Request


class KVCacheManager:
    """Owner of the block pool and of all block tables of a replica.

    events, prefix_log: told of every block that can be hit, or no longer; None: nobody listens
    windows:            of each KV cache group; None: full attention
    max_step_tokens:    tokens of one request that one step computes at most; needed when there are windows
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        events: KVEventLog | None = None,
        prefix_log: PrefixLog | None = None,
        windows: Sequence[int | None] = (None,),
        max_step_tokens: int = 0,
    ) -> None:
        self._layout = KVLayout(block_size=block_size, windows=windows, max_step_tokens=max_step_tokens)
        assert max_step_tokens > 0 or not self._layout.windows
        self._num_groups = len(windows)
        self.block_size = block_size
        self.shares_prefixes = enable_prefix_caching
        self._pool = BlockPool(num_blocks, events, prefix_log)
        self._is_told = events is not None
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_published: dict[str, int] = {}
        # Columns that each group with a window has given back already.
        self._num_passed: dict[str, dict[int, int]] = {}

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when one request has all blocks."""
        return self._layout.capacity_tokens(self._pool.num_blocks)

    @property
    def usage(self) -> float:
        """Part of the blocks that running requests hold; 0 when idle, whatever is cached."""
        return self._pool.usage

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out, evictable cached ones included."""
        return self._pool.num_free_blocks

    @property
    def num_free_tokens(self) -> int:
        """Tokens of one request that takes all these blocks."""
        return self._layout.capacity_tokens(self._pool.num_free_blocks)

    @property
    def num_blocks(self) -> int:
        """All blocks but the null block."""
        return self._pool.num_blocks

    @property
    def cached_hashes(self) -> Iterable[bytes]:
        """The hashes of all blocks that listeners are told of: those of the first group."""
        return self._pool.cached_hashes

    def get_block_ids(self, request_id: str) -> list[int]:
        """Return the block table of an admitted request, column by column; 0 where no block is needed."""
        return [block.block_id for block in self._tables[request_id]]

    def num_slots(self, request_id: str) -> int:
        """Tokens that the blocks of an admitted request have room for."""
        return len(self._tables[request_id]) // self._num_groups * self.block_size

    def num_hit_tokens(self, hits: Sequence[KVCacheBlock]) -> int:
        """Tokens whose KV the blocks of `get_computed_blocks` spare."""
        return len(hits) // self._num_groups * self.block_size

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """Find the longest prefix of `request` in the cache, at most all tokens but one; column by column.

        One token must be computed, or there would be nothing to sample from. None for a request that needs its
        whole prompt computed. No side effects.
        """
        if not self.shares_prefixes or request.needs_whole_prompt:
            return []
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        block_hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        by_group = []
        for group in self._layout.full_groups:
            hits = []
            for block_hash in block_hashes:
                block = self._pool.get_cached_block(_key(block_hash, group))
                if block is None:
                    break
                hits.append(block)
            by_group.append(hits)
            del block_hashes[len(hits) :]
        if self._num_groups == 1 and by_group:
            return by_group[0]
        return self._join_hits(by_group, block_hashes)

    def has_room_for(self, request: Request, hits: Sequence[KVCacheBlock], num_spare_blocks: int) -> bool:
        """Say whether all tokens known of a waiting request fit, and leave `num_spare_blocks` free."""
        most = self._layout.max_blocks(request.num_tokens, len(hits) // self._num_groups)
        num_held = len(hits) - hits.count(self._pool.null_block)
        return most - num_held + self._num_free(hits) + num_spare_blocks <= self._pool.num_free_blocks

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hits: Sequence[KVCacheBlock] = ()
    ) -> list[int] | None:
        """Give `request` room for `num_new_tokens` tokens beyond its computed ones.

        hits: of `get_computed_blocks`, at admission; request.num_computed_tokens counts them already.
        Returns the ids of the newly taken blocks (hits left out), or None when there are not enough free
        ones; nothing has been taken then, and the scheduler may preempt and ask again.
        """
        table = self._tables.get(request.request_id)
        assert table is None or not hits, "hits come at admission only"
        if table is not None and self._layout.windows:
            self._free_passed(request, table)
        num_held = len(table) if table is not None else len(hits)
        num_total_tokens = request.num_computed_tokens + num_new_tokens
        num_needed = max(0, -(-num_total_tokens // self.block_size) * self._num_groups - num_held)
        if num_needed + (self._num_free(hits) if hits else 0) > self._pool.num_free_blocks:
            return None
        if table is None:
            # Hits leave the free list first, or allocate could hand out one of them.
            self._pool.touch(hits)
            table = self._tables[request.request_id] = list(hits)
            self._num_published[request.request_id] = len(hits) // self._num_groups
        new_blocks = self._pool.allocate(num_needed)
        table.extend(new_blocks)
        request.num_slots = len(table) // self._num_groups * self.block_size
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
            self._num_passed.pop(request.request_id, None)
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
            assert len(table) % self._num_groups == 0
            held = [block for block in table if block is not self._pool.null_block]
            assert len(held) == len(set(held)), "a block stands twice in one table"
            for block in held:
                num_refs[block.block_id] = num_refs.get(block.block_id, 0) + 1
                blocks[block.block_id] = block
        assert all(blocks[block_id].num_refs == count for block_id, count in num_refs.items())
        assert len(num_refs) + self._pool.num_free_blocks == self._pool.num_blocks
        assert self._tables.keys() == self._num_published.keys()

    def _join_hits(
        self, full_hits: Sequence[Sequence[KVCacheBlock]], block_hashes: Sequence[bytes]
    ) -> list[KVCacheBlock]:
        """Cut the prefix that the groups of full attention have down to what those with a window can serve."""
        layout = self._layout
        windowed = {
            group: [self._pool.get_cached_block(_key(block_hash, group)) for block_hash in block_hashes]
            for group in layout.windows
        }
        num_columns = len(block_hashes)
        is_served = False
        while not is_served:
            is_served = True
            for group, blocks in windowed.items():
                first = max(0, num_columns - layout.num_seen_columns(group))
                missing = [column for column in range(first, num_columns) if blocks[column] is None]
                if missing:
                    # Any prefix that ends behind the last one that is missing needs it, too.
                    num_columns, is_served = missing[-1], False
        groups: list[Sequence[KVCacheBlock | None]] = []
        full = iter(full_hits)
        for group in range(self._num_groups):
            if group in windowed:
                num_null = max(0, num_columns - layout.num_seen_columns(group))
                groups.append([*[None] * num_null, *windowed[group][num_null:num_columns]])
            else:
                groups.append(next(full)[:num_columns])
        return [block or self._pool.null_block for column in zip(*groups, strict=True) for block in column]

    def _free_passed(self, request: Request, table: list[KVCacheBlock]) -> None:
        """Give back the blocks that no query to come sees, the first one first: it is hit the least."""
        num_passed = self._num_passed.setdefault(request.request_id, {})
        for group in self._layout.windows:
            first = num_passed.get(group, 0)
            stop = self._layout.num_passed_columns(group, request.num_computed_tokens)
            if stop <= first:
                continue
            # By now more of its tokens may be known than when it was filled.
            self._publish(request, table, request.num_computed_tokens)
            places = range(first * self._num_groups + group, stop * self._num_groups, self._num_groups)
            self._pool.free([table[place] for place in places])
            for place in places:
                table[place] = self._pool.null_block
            num_passed[group] = stop

    def _num_free(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Count hits that nobody uses: taking them takes them out of the free list."""
        return sum(block.num_refs == 0 and block is not self._pool.null_block for block in blocks)

    def _publish(self, request: Request, table: list[KVCacheBlock], num_computed_after: int) -> None:
        if not self.shares_prefixes:
            return
        num_full = min(num_computed_after, request.num_tokens) // self.block_size
        first = self._num_published[request.request_id]
        if num_full <= first:
            return
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        for index in range(first, num_full):
            block_hash = request.block_hashes[index]
            for group in range(self._num_groups):
                block = table[index * self._num_groups + group]
                if block is self._pool.null_block:
                    continue
                describe = None
                if self._is_told and group == 0:
                    describe = functools.partial(_describe, request, index, self.block_size)
                self._pool.publish(block, _key(block_hash, group), describe, is_told=group == 0)
        self._num_published[request.request_id] = num_full


def _describe(request: Request, index: int, block_size: int) -> BlockStored:
    return BlockStored(
        block_hash=request.block_hashes[index],
        parent_hash=request.block_hashes[index - 1] if index else None,
        token_ids=request.token_ids[index * block_size : (index + 1) * block_size],
        extra_keys=list(request.extra_keys) if index == 0 else [],
    )


def _key(block_hash: bytes, group: int) -> bytes:
    """Name a block in the pool. Of the first group it is the hash itself, of which listeners are told."""
    return block_hash + bytes((group,)) if group else block_hash
