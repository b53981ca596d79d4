"""CollectiveArena: where the ranks of one host lay down what they exchange, and how they wait for each other.

Called by: the executor makes the segment (`create_arena`), each rank's TensorParallelGroup maps it. One thread per
rank. Bytes only; what is in them, and the sums, are the group's business.

Layout: geometry | a line per rank | data, two slots per rank. A line holds words that its rank alone writes:

  posted   how many exchanges this rank has entered; the word on which its peers sleep
  closed   1 once the rank has left
  pid      for the others to watch
  tag 0/1  which collective its exchange belongs to, for exchanges of even and odd number

An exchange is one synchronisation: a rank fills its slot number n % 2, enters exchange n by `posted = n`, and goes
on when every rank has posted n. Then it may read slot n % 2 of every rank, until it enters exchange n + 1.

Why two slots are enough. Rank A writes slot n % 2 again for exchange n + 2, and must not disturb a slow rank B that
still reads what A wrote for exchange n. A has left exchange n + 1, hence saw B's posted >= n + 1; and B posts
n + 1 only when it is done with reading exchange n. So B no longer reads. One slot would not do: A leaves exchange
n as soon as B has entered it, and B reads only then.

When a peer dies: a wait looks every 0.25 s at the peer's pidfd, and raises CollectiveError, which names the rank
and the collective. What the peer posted before counts.
"""

import math
import os
import select
import time
from enum import StrEnum

from .errors import CollectiveError, ProtocolError
from .ordering import CACHE_LINE_BYTES, WORD_BYTES, Futex, map_words
from .segment import SharedSegment

MAX_RANKS = 64
SLOT_BYTES = 1 << 20
"""Of an arena of ranks: the longest piece of a message. Two slots of all ranks fit the cache that the cores share."""
WAIT_SLICE_S = 0.25
"""Longest sleep before a wait looks at its peer again."""

_MAGIC = 0x5048_4C58_4152_4E41
_WORDS_PER_LINE = CACHE_LINE_BYTES // WORD_BYTES
_POSTED, _CLOSED, _PID, _TAG = 0, 1, 2, 3
_MIN_SPIN_S = 2e-6
_MAX_SPIN_S = 200e-6
_KIND_BITS = 3


class Collective(StrEnum):
    """What an exchange is for. All ranks must agree."""

    MEETING = "meeting"
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    BROADCAST = "broadcast"
    BARRIER = "barrier"


_KINDS = tuple(Collective)
_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def arena_bytes(num_ranks: int, slot_bytes: int) -> int:
    """Return the size of the segment of an arena."""
    return (1 + num_ranks) * CACHE_LINE_BYTES + num_ranks * 2 * slot_bytes


def create_arena(name: str, *, num_ranks: int, slot_bytes: int) -> SharedSegment:
    """Make the segment of an arena that nobody has entered. slot_bytes: a multiple of 64.

    Raises TransportError when there is no memory.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"an arena has 1 to {MAX_RANKS} ranks, not {num_ranks}")
    if slot_bytes < CACHE_LINE_BYTES or slot_bytes % CACHE_LINE_BYTES:
        raise ValueError(f"slots of {slot_bytes} bytes are not a multiple of {CACHE_LINE_BYTES}")
    segment = SharedSegment.create(name, arena_bytes(num_ranks, slot_bytes))
    words = map_words(segment.buffer[:CACHE_LINE_BYTES])
    words.store(1, num_ranks)
    words.store(2, slot_bytes)
    words.store(0, _MAGIC)
    words.close()
    return segment


class CollectiveArena:
    """One rank's view. Owns the segment. `meet`, then exchanges, then `close`.

    timeout_s: longest wait for a peer in one exchange
    half:      which of its two slots the rank fills before its next exchange
    data:      all slots: [num_ranks, 2, slot_bytes], as bytes. Release what is cut from it before `close`

    Raises ProtocolError when the segment holds no arena, or has no such rank.
    """

    def __init__(self, segment: SharedSegment, rank: int, *, timeout_s: float = math.inf) -> None:
        self._segment = segment
        head = map_words(segment.buffer[:CACHE_LINE_BYTES])
        magic, self.num_ranks, self.slot_bytes = head.load(0), head.load(1), head.load(2)
        head.close()
        if magic != _MAGIC or segment.size != arena_bytes(self.num_ranks, self.slot_bytes):
            raise ProtocolError("the segment does not hold an arena")
        if not 0 <= rank < self.num_ranks:
            raise ProtocolError(f"rank {rank} in an arena of {self.num_ranks}")
        self.rank = rank
        self.half = 1
        lines_bytes = (1 + self.num_ranks) * CACHE_LINE_BYTES
        self.data = segment.buffer[lines_bytes:]
        self._words = map_words(segment.buffer[:lines_bytes])
        self._futex = Futex()
        self._timeout_s = timeout_s
        self._own = _line_of(rank)
        self._own_address = self._words.address(self._own + _POSTED)
        self._peers = [(peer, _line_of(peer)) for peer in range(self.num_ranks) if peer != rank]
        self._pidfds: dict[int, int] = {}
        self._posted = 0
        self._spin_s = _MIN_SPIN_S
        self._is_closed = False

    def meet(self) -> None:
        """Return when all ranks are here. Comes first, once. Raises CollectiveError as `exchange`."""
        self._words.store(self._own + _PID, os.getpid())
        self.exchange(Collective.MEETING, 0)
        for peer, line in self._peers:
            # Its number cannot belong to somebody else yet: the peer has only just been here.
            try:
                self._pidfds[peer] = os.pidfd_open(self._words.load(line + _PID))
            except ProcessLookupError:
                raise CollectiveError(f"rank {peer} died right after it had come") from None

    def exchange(self, kind: Collective, num_bytes: int) -> None:
        """Publish this rank's slot, and wait until the slots of all ranks can be read.

        num_bytes: what the collective moves; like `kind` it must be the same on every rank.
        Raises CollectiveError when a peer is dead, has left, is late, or does something else; the group is of no
        more use then.
        """
        words = self._words
        self._posted = posted = self._posted + 1
        tag_index = _TAG + (posted & 1)
        tag = num_bytes << _KIND_BITS | _KIND_NUMBERS[kind]
        words.store(self._own + tag_index, tag)
        words.store(self._own + _POSTED, posted)
        self._futex.wake(self._own_address)
        for peer, line in self._peers:
            if words.load(line + _POSTED) < posted:
                self._wait_for(peer, line, posted, kind)
            if words.load(line + tag_index) != tag:
                other = _describe(words.load(line + tag_index))
                raise CollectiveError(f"rank {peer} is in {other}, and rank {self.rank} in {_describe(tag)}")
        self.half = (posted + 1) & 1

    def close(self) -> None:
        """Leave, and unmap. Idempotent; waits for nobody. Raises BufferError while `data` is in use."""
        if self._is_closed:
            return
        self._is_closed = True
        self._words.store(self._own + _CLOSED, 1)
        self._futex.wake(self._own_address)
        self._words.close()
        self.data.release()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()
        self._segment.close()

    def _wait_for(self, peer: int, line: int, posted: int, kind: Collective) -> None:
        """Wait until `peer` has posted `posted`: awake for a moment, then asleep."""
        words, index = self._words, line + _POSTED
        began_at = time.monotonic()
        spin_until = began_at + self._spin_s
        while time.monotonic() < spin_until:
            if words.load(index) >= posted:
                self._adapt(began_at)
                return
            # Where ranks share a core, the peer needs it.
            os.sched_yield()
        deadline_at = began_at + self._timeout_s
        while True:
            is_gone = words.load(line + _CLOSED) != 0 or self._is_dead(peer)
            # Looked at after the closing: who leaves posts first, so nothing can be missed in between.
            seen = words.load(index)
            if seen >= posted:
                self._adapt(began_at)
                return
            if is_gone:
                raise CollectiveError(f"rank {peer} is gone, and rank {self.rank} waits for it in {kind}")
            remaining_s = deadline_at - time.monotonic()
            if remaining_s <= 0:
                raise CollectiveError(
                    f"rank {peer} did not come to {kind} within {self._timeout_s:g} s of rank {self.rank}"
                )
            self._futex.wait(words.address(index), seen, min(remaining_s, WAIT_SLICE_S))

    def _adapt(self, began_at: float) -> None:
        """Stay awake longer next time if that would have met this peer, and less if it would not."""
        if time.monotonic() - began_at <= _MAX_SPIN_S:
            self._spin_s = min(_MAX_SPIN_S, self._spin_s * 2)
        else:
            self._spin_s = max(_MIN_SPIN_S, self._spin_s / 2)

    def _is_dead(self, peer: int) -> bool:
        pidfd = self._pidfds.get(peer)
        if pidfd is None:
            return False
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(0))


def _line_of(rank: int) -> int:
    return (1 + rank) * _WORDS_PER_LINE


def _describe(tag: int) -> str:
    number = tag & ((1 << _KIND_BITS) - 1)
    name = _KINDS[number] if number < len(_KINDS) else "an unknown collective"
    return f"{name} of {tag >> _KIND_BITS} bytes"
