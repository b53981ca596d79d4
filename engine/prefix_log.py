"""PrefixLog: which blocks the prefix cache of one replica has won and lost, for the front ends that route by it. Pure.

Called by: BlockPool records, EngineCore takes a delta after each step. Front ends keep the sum of all deltas (see
cluster/prefix_index.py). Only keys travel, the first `KEY_BYTES` of each block hash: two blocks of one key would cost
a detour of one request, nothing else. What a block holds, and replay for listeners outside, is kv_events.py.

    follow   -> delta 5, clears, with all that is held     sequence numbers go on from there without a gap;
    step     -> delta 6: stored, removed                   whoever sees a gap asks to follow again
    step     -> delta 7

While nobody follows nothing is recorded.
"""

from collections.abc import Iterable

import msgspec

KEY_BYTES = 8


class PrefixDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What has changed since the delta before it.

    sequence: one more with each delta of one epoch
    clears:   whatever was held before is not held any more; applied before `stored` and `removed`
    stored, removed: keys that can be hit from now on, or no longer, one behind the other; no key is in both
    """

    epoch: int
    sequence: int
    clears: bool = False
    stored: bytes = b""
    removed: bytes = b""


def split_keys(keys: bytes) -> list[bytes]:
    """Take the keys of a delta apart. Raises ValueError when there is half a key."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are no whole number of keys")
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def block_keys(block_hashes: Iterable[bytes]) -> list[bytes]:
    """Give the keys of block hashes, in their order."""
    return [block_hash[:KEY_BYTES] for block_hash in block_hashes]


class PrefixLog:
    """Collects changes and cuts them into deltas. Owner: the engine core."""

    def __init__(self, *, epoch: int) -> None:
        self._epoch = epoch
        self._next_sequence = 0
        self._is_followed = False
        self._is_cleared = False
        # The last word on each hash: True when it is held now.
        self._changes: dict[bytes, bool] = {}

    def record(self, block_hash: bytes, is_held: bool) -> None:
        """Note that a block can be hit from now on, or no longer."""
        if self._is_followed:
            self._changes[block_hash] = is_held

    def record_cleared(self) -> None:
        """Note that the whole cache was forgotten."""
        if self._is_followed:
            self._changes.clear()
            self._is_cleared = True

    def take_delta(self) -> PrefixDelta | None:
        """Close the delta that is open, and return it. None when nothing has changed, or nobody follows."""
        if not self._changes and not self._is_cleared:
            return None
        stored = b"".join(block_keys(name for name, is_held in self._changes.items() if is_held))
        removed = b"".join(block_keys(name for name, is_held in self._changes.items() if not is_held))
        delta = PrefixDelta(
            epoch=self._epoch,
            sequence=self._next_sequence,
            clears=self._is_cleared,
            stored=stored,
            removed=removed,
        )
        self._next_sequence += 1
        self._changes = {}
        self._is_cleared = False
        return delta

    def follow(self, held: Iterable[bytes]) -> PrefixDelta:
        """Begin to record, and say what is held now. To be called right after `take_delta`.

        held: the hashes of all blocks that can be hit
        The answer has the number of the last delta: to the other followers, who do not get it, nothing is missing.
        """
        assert not self._changes, "what no delta has told would be told twice"
        self._is_followed = True
        return PrefixDelta(
            epoch=self._epoch,
            sequence=self._next_sequence - 1,
            clears=True,
            stored=b"".join(block_keys(held)),
        )
