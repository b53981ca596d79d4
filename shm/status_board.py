"""StatusBoard: what every process of a cluster is doing, readable from outside, also after its death.

Called by: the main thread of each rank, engine core and API server, and of the coordinator, writes its slot
(`StatusSlot.set`); executors and the supervisor read. The supervisor creates the board and hands its descriptor down,
so that it outlives a replica.
Invariants: a slot has one writer and a cache line of its own. It is written by the main thread as it goes on,
never by a timer beside it: a heartbeat that beats while the rank hangs would be a lie.

A slot is read under a sequence lock: the writer makes the sequence odd, writes, and makes it even; a reader
that met an odd or a changed sequence looks again.

When the peer dies: its slot keeps the last phase. One that died (or was stopped) in the middle of a change leaves
an odd sequence; a reader gives up after some looks and returns the words as they are.
"""

import os
import time
from dataclasses import dataclass
from enum import StrEnum

from .ordering import CACHE_LINE_BYTES, WORD_BYTES, Words, map_words
from .segment import SharedSegment

_WORDS_PER_SLOT = CACHE_LINE_BYTES // WORD_BYTES
_SEQUENCE, _PHASE, _CALL_ID, _STEP, _SINCE = 0, 1, 2, 3, 4
_MAX_LOOKS = 100
_NS_PER_S = 1_000_000_000


class Phase(StrEnum):
    """What a process is busy with. The order is the number in shared memory: append only."""

    NOT_STARTED = "not started"
    OTHER = "other"
    """A phase whose name is not in this list."""
    IMPORT = "import"
    DEVICE = "device"
    PROCESS_GROUP = "process group"
    WEIGHTS = "weights"
    PROFILE = "profile"
    KV_CACHE = "KV cache"
    IDLE = "idle"
    READING = "reading"
    INPUT = "input"
    FORWARD = "forward"
    COLLECTIVE = "collective"
    SAMPLING = "sampling"
    REPLYING = "replying"
    SCHEDULING = "scheduling"
    WAITING = "waiting"
    STOPPING = "stopping"
    HOOK = "hook"
    MASKS = "masks"
    """Waits for the grammar masks of its step."""
    PAUSED = "paused"
    """Makes no steps until it is told to."""
    GRAPHS = "CUDA graphs"
    SERVING = "serving"
    """An API server or the coordinator goes on."""

    @classmethod
    def named(cls, name: str) -> "Phase":
        """Return the phase of that name, OTHER when there is none."""
        return _BY_NAME.get(name, cls.OTHER)


_PHASES = tuple(Phase)
_BY_NAME = {phase.value: phase for phase in _PHASES}
_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What one rank was doing.

    since_at: instant of time.monotonic() at which the phase began; 0.0 when nothing was ever written
    call_id:  the executor's call that is being served; 0: none yet. Of an engine core: its unfinished requests
    step:     the engine's step that is being computed; 0: none yet. Of an engine core: the steps it has made
    """

    phase: Phase
    since_at: float
    call_id: int
    step: int


class StatusSlot:
    """The writing side of one slot. One thread."""

    def __init__(self, words: Words, slot: int) -> None:
        self._store = words.store
        self._base = slot * _WORDS_PER_SLOT
        self._sequence = words.load(self._base + _SEQUENCE)
        self._sequence += self._sequence % 2  # the writer before us died in the middle of a change
        if self._sequence:
            self.set(Phase.NOT_STARTED, call_id=0, step=0)  # nothing of that writer's shall look like ours

    def set(self, phase: Phase, *, call_id: int | None = None, step: int | None = None) -> None:
        """Say that `phase` begins now. What is None stays as it was. About 1 µs; never blocks."""
        store, base = self._store, self._base
        store(base + _SEQUENCE, self._sequence + 1)
        store(base + _PHASE, _NUMBERS[phase])
        if call_id is not None:
            store(base + _CALL_ID, call_id)
        if step is not None:
            store(base + _STEP, step)
        store(base + _SINCE, time.monotonic_ns())
        self._sequence += 2
        store(base + _SEQUENCE, self._sequence)


class StatusBoard:
    """A table of slots in shared memory. Reading is allowed to any thread."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self.num_slots = segment.size // CACHE_LINE_BYTES
        self._words = map_words(segment.buffer)
        self._is_closed = False

    @classmethod
    def create(cls, num_slots: int) -> "StatusBoard":
        """Make a board of empty slots. Raises TransportError when there is no memory."""
        return cls(SharedSegment.create("status-board", num_slots * CACHE_LINE_BYTES))

    @classmethod
    def attach(cls, fd: int, num_slots: int) -> "StatusBoard":
        """Map the board that was inherited as `fd`, and own that descriptor. Raises TransportError."""
        return cls(SharedSegment.attach(fd, num_slots * CACHE_LINE_BYTES))

    @property
    def fd(self) -> int:
        """The descriptor to hand to a child."""
        return self._segment.fd

    def writer(self, slot: int) -> StatusSlot:
        """Return the writing side of `slot`, for the one thread that owns it."""
        self._check(slot)
        return StatusSlot(self._words, slot)

    def read(self, slot: int) -> RankStatus:
        """Return what the owner of `slot` wrote last."""
        self._check(slot)
        words, base = self._words, slot * _WORDS_PER_SLOT
        for _ in range(_MAX_LOOKS):
            before = words.load(base + _SEQUENCE)
            status = self._read_words(base)
            if before % 2 == 0 and words.load(base + _SEQUENCE) == before:
                return status
            os.sched_yield()
        return self._read_words(base)

    def _read_words(self, base: int) -> RankStatus:
        number = self._words.load(base + _PHASE)
        return RankStatus(
            phase=_PHASES[number] if number < len(_PHASES) else Phase.OTHER,
            since_at=self._words.load(base + _SINCE) / _NS_PER_S,
            call_id=self._words.load(base + _CALL_ID),
            step=self._words.load(base + _STEP),
        )

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")

    def close(self) -> None:
        """Unmap. Slots of this board must not be written afterwards (ValueError). Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._words.close()
            self._segment.close()
