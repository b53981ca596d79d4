"""KVLayout: how many blocks of which KV cache group a request needs, keeps, and lets go. Pure.

Called by: KVCacheManager. Lives in the engine-core process only.

A table is made of columns: `block_size` tokens, with one block of each group. A group with a window w keeps only
the blocks that hold a token which a query to come sees; the others' places are taken by the null block.

    computed tokens   ...................................|
    full attention    [ 3][ 7][ 9][12][15][18][21][24][27]
    window            [ 0][ 0][ 0][ 0][ 0][ 0][22][25][28]
                                              |<- w - 1 ->|
"""

from collections.abc import Sequence

UNBOUNDED_TOKENS = 1 << 60
"""What a cache holds whose groups all have a window: a request of any length."""


class KVLayout:
    """The KV cache groups of a model.

    windows:         of each group, the tokens that a query sees at most, itself among them; None: all
    max_step_tokens: tokens of one request that one step computes at most
    """

    def __init__(self, *, block_size: int, windows: Sequence[int | None], max_step_tokens: int) -> None:
        assert windows
        self.block_size = block_size
        self.num_groups = len(windows)
        self.full_groups = [group for group, window in enumerate(windows) if window is None]
        self.windows = {group: window for group, window in enumerate(windows) if window is not None}
        """By group; those without one are left out."""
        # The tokens before a step that it sees, and its own, and as the first column may hold one of them only.
        self._max_columns = {
            group: self.num_columns(window - 1 + max_step_tokens) + 1
            for group, window in self.windows.items()
        }

    def num_columns(self, num_tokens: int) -> int:
        """Columns that `num_tokens` tokens from the first one take."""
        return -(-num_tokens // self.block_size)

    def num_passed_columns(self, group: int, num_computed_tokens: int) -> int:
        """Columns at the front of which no query to come sees a token, in a group with a window."""
        return max(0, num_computed_tokens - self.windows[group] + 1) // self.block_size

    def num_seen_columns(self, group: int) -> int:
        """Columns before a column's border that the query right behind it sees, in a group with a window."""
        return self.num_columns(self.windows[group] - 1)

    def max_blocks(self, num_tokens: int, num_hit_columns: int = 0) -> int:
        """Most blocks that a request holds at once until `num_tokens` tokens are computed.

        num_hit_columns: columns that the prefix cache gave it; no blocks are needed for those before a window
        """
        columns = self.num_columns(num_tokens)
        total = columns * len(self.full_groups)
        for group, most in self._max_columns.items():
            num_null = max(0, num_hit_columns - self.num_seen_columns(group))
            total += min(columns - num_null, most)
        return total

    def capacity_tokens(self, num_blocks: int) -> int:
        """Longest request, in tokens, that never needs more than `num_blocks` blocks at once."""
        if not self.windows:
            return num_blocks // self.num_groups * self.block_size
        if not self.full_groups and sum(self._max_columns.values()) <= num_blocks:
            return UNBOUNDED_TOKENS
        # The need grows with the length: bisect for the last column that fits.
        fits, too_many = 0, num_blocks + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.max_blocks(middle * self.block_size) <= num_blocks:
                fits = middle
            else:
                too_many = middle
        return fits * self.block_size
