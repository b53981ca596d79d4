"""Virtual time, and a network whose delays depend on the seed and on nothing else.

Taking an event out of a schedule must leave the rest as it was, or no failure could be made smaller. So no delay is
drawn from a generator's state: each is a hash of the seed, the link's name and the number of the message on it.
"""

import heapq
import zlib
from collections.abc import Callable
from typing import Any

_MASK = (1 << 64) - 1


def draw_bits(key: int, number: int) -> int:
    """64 random bits that belong to this key of a `World`, and this number."""
    x = key ^ number * 0x165667B19E3779F9
    x = ((x ^ x >> 29) * 0xBF58476D1CE4E5B9) & _MASK
    return (x ^ x >> 32) * 0x94D049BB133111EB & _MASK


class Timer:
    """A call to come, as an event loop's `call_later` returns it."""

    __slots__ = ("_action", "is_cancelled")

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def fire(self) -> None:
        if not self.is_cancelled:
            self._action()


class World:
    """The clock and the queue of what is to happen. Takes the place of the running event loop."""

    def __init__(self, seed: int, max_delay_s: float) -> None:
        self.now = 0.0
        self.max_delay_s = max_delay_s
        self._seed = seed * 0x9E3779B97F4A7C15 & _MASK
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._num_queued = 0

    def clock(self) -> float:
        return self.now

    def at(self, when: float, action: Callable[..., object], *arguments: object) -> None:
        self._num_queued += 1
        heapq.heappush(self._queue, (when, self._num_queued, action, arguments))

    def call_later(self, delay_s: float, action: Callable[[], object]) -> Timer:
        timer = Timer(action)
        # Never early: where time stands still, a timer that was rounded down would be set again and again.
        self.at(self.now + delay_s + 1e-9, timer.fire)
        return timer

    def chance(self, name: int, number: int) -> float:
        """A number in [0, 1) that belongs to this name and number."""
        return draw_bits(self.key(name), number) / (1 << 64)

    def key(self, name: int) -> int:
        """What `draw_bits` needs to know of this seed and name."""
        return self._seed ^ name * 0xC2B2AE3D27D4EB4F

    def run(self, max_events: int) -> None:
        """Let everything happen until nothing is left to happen. Raises AssertionError when it never ends."""
        queue = self._queue
        for _ in range(max_events):
            if not queue:
                return
            self.now, _, action, arguments = heapq.heappop(queue)
            action(*arguments)
        raise AssertionError(f"still busy after {max_events} events")


class Link:
    """One direction between two processes: in order, late, and perhaps cut.

    repeats:   part of the messages that arrive twice
    drops:     part of the messages that get lost while both ends live
    reorders:  a message may overtake another
    """

    __slots__ = (
        "_drops",
        "_ends_at",
        "_key",
        "_last_at",
        "_num_sent",
        "_receive",
        "_reorders",
        "_repeats",
        "_world",
    )

    def __init__(
        self,
        world: World,
        name: str,
        receive: Callable[[Any], object],
        *,
        repeats: float = 0.0,
        drops: float = 0.0,
        reorders: bool = False,
    ) -> None:
        self._world = world
        self._key = world.key(zlib.crc32(name.encode()))
        self._receive = receive
        self._repeats = repeats * 1024
        self._drops = drops * 1024
        self._reorders = reorders
        self._num_sent = 0
        self._last_at = 0.0
        self._ends_at = float("inf")

    def send(self, message: object) -> None:
        world = self._world
        self._num_sent += 1
        bits = draw_bits(self._key, self._num_sent)
        late = (bits >> 44) / (1 << 20)
        # Squared: most messages are quick, a few are late.
        at = world.now + world.max_delay_s * late * late
        if not self._reorders:
            if at < self._last_at:
                at = self._last_at
            self._last_at = at
        if (bits & 0x3FF) < self._drops:
            return
        world.at(at, self._deliver, message, at)
        if (bits >> 10 & 0x3FF) < self._repeats:
            world.at(at, self._deliver, message, at)

    def cut(self) -> None:
        """An end is gone: what is on its way arrives up to some instant, and nothing after it."""
        if self._ends_at == float("inf"):
            world = self._world
            spare_s = world.max_delay_s * max(0.0, draw_bits(self._key, 0) / (1 << 63) - 1)
            self._ends_at = world.now + spare_s

    def _deliver(self, message: object, at: float) -> None:
        if at <= self._ends_at:
            self._receive(message)
