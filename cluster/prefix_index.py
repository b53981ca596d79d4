"""PrefixIndex: which replica holds which blocks, by the keys of their hashes. Pure.

Called by: DpClient, in each front end that routes by prefixes. It is the sum of the `PrefixDelta`s of all replicas
(engine/prefix_log.py), and of the blocks that this front end's own requests are about to make: until such a request
has its first token, its replica counts as holding its prompt.

    holders  key -> bits of the replicas that hold it, or are about to     one look-up a block
    held     what the deltas of each replica add up to                     exact
    pending  how many of our requests are about to make it there

A key stands for tokens and cache salt (engine/block_hash.py); the engine has no adapters that it could depend on.
Invariant: a bit is set in `holders` while the key is in `held` or in `pending` of that replica. A replica is unknown
until its first delta that clears, and again after a gap: whoever called `apply` then asks to follow anew.
"""

from collections.abc import Iterable, Sequence

from ..engine.prefix_log import PrefixDelta, split_keys

MAX_KEYS = 4_000_000
"""Keys that are kept, of all replicas together: about half a gigabyte. Later ones are left out, and counted."""


class PrefixIndex:
    """What all replicas hold. Owner: one front end's event loop.

    max_keys: bound of the memory; a key takes about 150 bytes
    """

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._holders: dict[bytes, int] = {}
        self._held: dict[int, set[bytes]] = {}
        self._pending: dict[int, dict[bytes, int]] = {}
        # (epoch, sequence) of the last delta of each replica.
        self._position: dict[int, tuple[int, int]] = {}
        self.num_left_out = 0
        self.num_gaps = 0

    @property
    def num_keys(self) -> int:
        """Different keys that some replica holds, or is about to."""
        return len(self._holders)

    def apply(self, dp_rank: int, delta: PrefixDelta) -> bool:
        """Take what a replica says. False: something before it is missing; nothing is known of the replica then.

        Raises ValueError for keys of a wrong length.
        """
        stored, removed = split_keys(delta.stored), split_keys(delta.removed)
        position = self._position.get(dp_rank)
        if delta.clears:
            self._forget_held(dp_rank)
        elif position != (delta.epoch, delta.sequence - 1):
            if position is not None:
                self.num_gaps += 1
                self._forget_held(dp_rank)
                self._position.pop(dp_rank)
            return False
        self._position[dp_rank] = (delta.epoch, delta.sequence)
        held = self._held.setdefault(dp_rank, set())
        holders, bit = self._holders, 1 << dp_rank
        for key in stored:
            bits = holders.get(key)
            if bits is None:
                if len(holders) >= self._max_keys:
                    self.num_left_out += 1
                    continue
                bits = 0
            holders[key] = bits | bit
            held.add(key)
        pending = self._pending.get(dp_rank, {})
        for key in removed:
            if key in held:
                held.remove(key)
                if key not in pending:
                    self._clear_bit(key, bit)
        return True

    def expect(self, dp_rank: int, keys: Iterable[bytes]) -> None:
        """One of our requests is about to make these blocks there. To be undone by `settle` with the same keys."""
        pending = self._pending.setdefault(dp_rank, {})
        holders, bit = self._holders, 1 << dp_rank
        for key in keys:
            pending[key] = pending.get(key, 0) + 1
            holders[key] = holders.get(key, 0) | bit

    def settle(self, dp_rank: int, keys: Iterable[bytes]) -> None:
        """The request has made them, or never will: from now on the deltas alone say what is held."""
        pending = self._pending.get(dp_rank)
        if pending is None:
            return
        held, bit = self._held.get(dp_rank, set()), 1 << dp_rank
        for key in keys:
            count = pending.get(key, 0)
            if count > 1:
                pending[key] = count - 1
            elif count == 1:
                del pending[key]
                if key not in held:
                    self._clear_bit(key, bit)

    def forget(self, dp_rank: int) -> None:
        """The replica is gone, with its cache and with all that was expected of it."""
        self._forget_held(dp_rank)
        self._position.pop(dp_rank, None)
        bit = 1 << dp_rank
        for key in self._pending.pop(dp_rank, ()):
            self._clear_bit(key, bit)

    def match(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return by replica how many of the first blocks it holds; replicas that hold none are left out.

        Cost: one dictionary look-up a block, up to the first block that nobody holds.
        """
        found: dict[int, int] = {}
        if not keys:
            return found
        get = self._holders.get
        alive = get(keys[0], 0)
        num_blocks = 0
        for key in keys:
            bits = get(key, 0)
            if bits & alive != alive:
                _note(found, alive & ~bits, num_blocks)
                alive &= bits
                if not alive:
                    return found
            num_blocks += 1
        _note(found, alive, num_blocks)
        return found

    def check_invariants(self) -> None:
        """Raise AssertionError when the books are wrong. For tests."""
        expected: dict[bytes, int] = {}
        for by_rank in (self._held, self._pending):
            for dp_rank, keys in by_rank.items():
                for key in keys:
                    expected[key] = expected.get(key, 0) | 1 << dp_rank
        assert self._holders == expected
        assert all(count > 0 for pending in self._pending.values() for count in pending.values())

    def _forget_held(self, dp_rank: int) -> None:
        pending, bit = self._pending.get(dp_rank, {}), 1 << dp_rank
        for key in self._held.pop(dp_rank, ()):
            if key not in pending:
                self._clear_bit(key, bit)

    def _clear_bit(self, key: bytes, bit: int) -> None:
        bits = self._holders[key] & ~bit
        if bits:
            self._holders[key] = bits
        else:
            del self._holders[key]


def _note(found: dict[int, int], bits: int, num_blocks: int) -> None:
    """Write down `num_blocks` for every replica of `bits`."""
    while bits and num_blocks:
        lowest = bits & -bits
        found[lowest.bit_length() - 1] = num_blocks
        bits ^= lowest
