"""The prefix cache of a replica in simulated time, which follows engine/block_pool.py. Pure.

Called by: replica.py. Free blocks keep their contents until they are needed; the least recently used goes first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from ....engine.prefix_log import PrefixLog


class PrefixCache:
    """Blocks by key, with reference counts; those that nobody uses are evicted, the least recently used first."""

    def __init__(self, block_tokens: int, log: PrefixLog) -> None:
        self.block_tokens = block_tokens
        self._log = log
        self._used: dict[bytes, int] = {}
        self._free: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Blocks that some job uses."""
        return len(self._used)

    @property
    def num_free(self) -> int:
        """Blocks that could be evicted."""
        return len(self._free)

    def num_hits(self, keys: Sequence[bytes]) -> int:
        """How many of the first blocks are there."""
        count = 0
        for key in keys:
            if key not in self._used and key not in self._free:
                break
            count += 1
        return count

    def num_hits_free(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks, which are there, nobody uses."""
        return sum(key in self._free for key in keys)

    def use(self, keys: Sequence[bytes]) -> None:
        """Take blocks that are there."""
        for key in keys:
            count = self._used.get(key, 0)
            if count == 0:
                del self._free[key]
            self._used[key] = count + 1

    def add(self, key: bytes) -> bool:
        """Take a block that is about to be computed. False: it is there already, and was not taken."""
        if key in self._used or key in self._free:
            return False
        self._log.record(key, True)
        self._used[key] = 1
        return True

    def release(self, keys: Sequence[bytes]) -> None:
        """Give blocks back, tails first."""
        for key in reversed(keys):
            count = self._used[key]
            if count == 1:
                del self._used[key]
                self._free[key] = None
            else:
                self._used[key] = count - 1

    def add_free(self, keys: Sequence[bytes]) -> None:
        """Keep blocks that a finished job has made, tails first; those that are there already stay as they are."""
        for key in reversed(keys):
            if key not in self._used:
                if key not in self._free:
                    self._log.record(key, True)
                self._free[key] = None
                self._free.move_to_end(key)

    def evict(self, count: int) -> None:
        """Forget the least recently used blocks."""
        for _ in range(min(count, len(self._free))):
            key, _ = self._free.popitem(last=False)
            self._log.record(key, False)
