"""The ring's protocol over all its interleavings, on two machines; and without each of its parts, which must show.

The last tests hold the model to the code: the same accesses in the same order. What a real machine of the weaker kind
does was never seen: there was none to run this on.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from phalanx.shm import ring_end, ring_layout
from phalanx.shm.ordering import Cells, Words, map_words
from phalanx.shm.ring_buffer import RingReader, RingWriter, create_ring
from phalanx.shm.ring_layout import flags_bytes, lines_bytes
from phalanx.shm.segment import SharedSegment
from support.memory_model import (
    Check,
    Fence,
    Jump,
    KernelStore,
    Label,
    Load,
    Machine,
    Operation,
    Program,
    RemoteFence,
    Sleep,
    Store,
    Violation,
    explore,
)
from support.ring_model import (
    ALL_FENCES,
    BARRIERS,
    BELLS,
    FENCES,
    FLAGS,
    IMPLIED_FENCES,
    ORDERS,
    WAKES,
    Model,
)

Scenario = Callable[..., list[Program]]
"""Makes the programs of `Model(**parts)`."""


def one_slot(**parts: Any) -> list[Program]:
    """Both ends wait for each other; the slot is used again; the writer closes."""
    return Model(num_records=2, **parts).programs()


def two_slots(**parts: Any) -> list[Program]:
    """As one_slot; what an end knows of the other's cursor spares it a look."""
    return Model(num_records=3, num_slots=2, **parts).programs()


def reader_leaves(**parts: Any) -> list[Program]:
    """The reader closes while the writer waits for room."""
    return Model(num_records=3, **parts).programs(num_read=1)


def two_readers_leave(**parts: Any) -> list[Program]:
    """Two readers of one record each."""
    return Model(num_records=1, num_readers=2, **parts).programs(num_read=1)


def two_readers(**parts: Any) -> list[Program]:
    """Two readers, until the writer closes."""
    return Model(num_records=1, num_readers=2, **parts).programs()


def bell(**parts: Any) -> list[Program]:
    """Two rings, and one who waits for both."""
    return Model(num_records=1, **parts).bell_programs()


def violates(scenario: Scenario, machine: Machine, *without: str, has_flags: bool = True) -> bool:
    try:
        explore(scenario(without=frozenset(without), has_flags=has_flags), machine)
    except Violation:
        return True
    return False


@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize("scenario", [one_slot, reader_leaves, bell])
def test_every_interleaving_delivers_everything_and_ends(scenario: Scenario, machine: Machine) -> None:
    num_states = explore(scenario(), machine)

    assert num_states > 200


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize("scenario", [two_slots, two_readers_leave])
def test_every_interleaving_of_more_delivers_everything_and_ends(
    scenario: Scenario, machine: Machine
) -> None:
    num_states = explore(scenario(), machine)

    assert num_states > 10_000


@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize(
    "scenario",
    [
        *(one_slot, two_slots, reader_leaves, bell),
        pytest.param(two_readers_leave, marks=pytest.mark.full),
        pytest.param(two_readers, marks=pytest.mark.full),
    ],
)
def test_every_interleaving_ends_where_the_kernel_has_no_fence_for_all(
    scenario: Scenario, machine: Machine
) -> None:
    num_states = explore(scenario(has_flags=False), machine)

    assert num_states > 200


@pytest.mark.parametrize("fence", FENCES)
def test_a_missing_fence_is_found_where_the_machine_reorders(fence: str) -> None:
    assert violates(one_slot, Machine.ARM, fence)
    assert not violates(one_slot, Machine.TSO, fence)


@pytest.mark.parametrize("fence", IMPLIED_FENCES)
@pytest.mark.parametrize("scenario", [pytest.param(one_slot, marks=pytest.mark.full), reader_leaves, bell])
def test_a_fence_that_something_else_implies_can_be_missing(scenario: Scenario, fence: str) -> None:
    assert not violates(scenario, Machine.ARM, fence)


@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize("part", [*BARRIERS, *WAKES, *ORDERS])
def test_a_missing_barrier_or_wake_up_is_found_where_the_kernel_has_no_fence_for_all(
    part: str, machine: Machine
) -> None:
    scenario = reader_leaves if part == "wake: reader closes" else one_slot

    assert violates(scenario, machine, part, has_flags=False)


@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize("part", [*ALL_FENCES, *FLAGS])
def test_a_flag_without_its_fence_or_in_a_wrong_order_is_found_on_both(part: str, machine: Machine) -> None:
    assert violates(one_slot, machine, part)


@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize("part", [*BARRIERS, *WAKES, *ORDERS])
def test_a_missing_barrier_or_wake_up_and_a_wrong_order_are_found_on_both(
    part: str, machine: Machine
) -> None:
    assert violates(reader_leaves if part == "wake: reader closes" else one_slot, machine, part)


@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize("part", BELLS)
def test_a_bell_that_rings_wrongly_is_found_on_both(part: str, machine: Machine) -> None:
    assert violates(bell, machine, part)


# The model of the machines --------------------------------------------------------------------------------------


def message_passing(*, release: bool, acquire: bool) -> list[Program]:
    is_stale = Check("who sees the flag sees the data", ("flag", "data"), _not_flag_without_data)
    return [
        [Store("data", 1), Store("flag", 1, release=release)],
        [Load("flag", "flag", acquire=acquire), Load("data", "data"), is_stale],
    ]


def _not_flag_without_data(registers: dict[str, int]) -> bool:
    return not (registers["flag"] == 1 and registers["data"] == 0)


@pytest.mark.parametrize(
    ("release", "acquire", "machine", "is_safe"),
    [
        (False, False, Machine.TSO, True),
        (True, True, Machine.ARM, True),
        (True, False, Machine.ARM, False),
        (False, True, Machine.ARM, False),
    ],
)
def test_a_message_is_passed_as_on_the_machine(
    release: bool, acquire: bool, machine: Machine, is_safe: bool
) -> None:
    assert violates(lambda **_: message_passing(release=release, acquire=acquire), machine) is not is_safe


@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_store_passes_a_later_load_on_both_unless_there_is_a_fence(
    machine: Machine, is_fenced: bool
) -> None:
    def programs(**_: Any) -> list[Program]:
        fence: list[Operation] = [Fence()] if is_fenced else []
        # Each says what it saw, and a third thread looks at both when they are over.
        ends: list[list[Operation]] = [
            [
                Store(mine, 1, release=True),
                *fence,
                Load("seen", theirs, acquire=True),
                Jump("saw it", ("seen",), lambda registers: registers["seen"] == 1),
                KernelStore(f"{mine} missed", 1),
                *_labelled("saw it"),
                KernelStore(f"{mine} over", 1),
            ]
            for mine, theirs in (("x", "y"), ("y", "x"))
        ]
        return [*ends, _judge()]

    assert violates(programs, machine) is not is_fenced


@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize("is_fenced", [False, True])
def test_one_side_may_fence_for_both(machine: Machine, is_fenced: bool) -> None:
    def programs(**_: Any) -> list[Program]:
        for_all: list[Operation] = [Fence(), RemoteFence(1), Fence()] if is_fenced else [Fence()]
        ends: list[list[Operation]] = [
            [
                Store(mine, 1, release=True),
                *fence,
                Load("seen", theirs),
                Jump("saw it", ("seen",), lambda registers: registers["seen"] == 1),
                KernelStore(f"{mine} missed", 1),
                *_labelled("saw it"),
                KernelStore(f"{mine} over", 1),
            ]
            for mine, theirs, fence in (("x", "y", for_all), ("y", "x", []))
        ]
        return [*ends, _judge()]

    assert violates(programs, machine) is not is_fenced


def _labelled(name: str) -> list[Operation]:
    return [Label(name)]


# The code makes the model's accesses ----------------------------------------------------------------------------


def _judge() -> list[Operation]:
    return [
        Sleep("x over", 1),
        Sleep("y over", 1),
        Load("x", "x missed"),
        Load("y", "y missed"),
        Check("one of them saw the other", ("x", "y"), lambda seen: seen["x"] + seen["y"] < 2),
    ]


class Asleep(Exception):
    """Instead of a sleep."""


class RecordingWords:
    """Words of a ring with one reader that tell of every access. names: of those that change"""

    def __init__(self, buffer: memoryview, accesses: list[str], names: dict[int, str]) -> None:
        self._words: Words = map_words(buffer)
        self._accesses = accesses
        self._names = names

    def load(self, index: int) -> int:
        self._accesses.append(f"load {self._names.get(index, 'constant')}")
        return self._words.load(index)

    def store(self, index: int, value: int) -> None:
        self._accesses.append(f"store {self._names.get(index, 'constant')}")
        self._words.store(index, value)

    @property
    def cells(self) -> Cells:
        return self

    __getitem__ = load
    __setitem__ = store

    def address(self, index: int) -> int:
        return index * 8

    def close(self) -> None:
        self._words.close()


class RecordingFutex:
    """A futex that tells of every call; addresses are indices of words, times 8."""

    def __init__(self, accesses: list[str]) -> None:
        self._accesses = accesses

    def waker(self, address: int) -> Callable[[], int]:
        def wake() -> int:
            self._accesses.append(f"wake {LINES[address // 8]}")
            return 0

        return wake

    def wait(self, address: int, expected: int, timeout_s: float) -> bool:
        self._accesses.append(f"sleep {LINES[address // 8]}")
        raise Asleep


class RecordingMembarrier:
    """A fence for all that tells of every call."""

    def __init__(self, accesses: list[str], is_available: bool) -> None:
        self._accesses = accesses
        self.is_available = is_available

    def issue(self) -> None:
        self._accesses.append("fence for all")


LINES = {8: "writer.word", 16: "reader0.word"}
FLAG_OF_WRITER, FLAG_OF_READER = 0, 1
FLAG_WORDS = {FLAG_OF_WRITER: "writer.flag", FLAG_OF_READER: "reader0.flag"}


def accesses_of(program: list[Operation]) -> list[str]:
    """Return what the program does to the lines, up to its first sleep; what the kernel does inside is one access."""
    found = []
    for operation in program:
        match operation:
            case Load() if operation.register != "now":
                found.append(f"load {operation.location}")
            case Store() if ".queue" not in operation.location:
                found.append(f"store {operation.location}")
            case RemoteFence():
                found.append("fence for all")
            case KernelStore():
                found.append(f"wake {operation.location.split('.')[0]}.word")
            case Sleep():
                return [*found, f"sleep {operation.location.split('.')[0]}.word"]
            case _:
                pass
    return found


@dataclass
class Recorded:
    """Both ends of a ring, and what they do; flags: where a test puts one up, as if somebody slept."""

    writer: RingWriter
    reader: RingReader
    flags: Words
    accesses: list[str]
    has_flags: bool

    def take(self) -> list[str]:
        """Return what was done since, but for looks at what does not change."""
        taken = [access for access in self.accesses if not access.endswith("constant")]
        self.accesses.clear()
        return taken


@pytest.fixture(params=[True, False], ids=["flags", "no flags"])
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    has_flags: bool = request.param
    accesses: list[str] = []
    names = FLAG_WORDS if has_flags else {}
    membarrier = RecordingMembarrier(accesses, has_flags)
    monkeypatch.setattr(ring_layout, "Membarrier", lambda: membarrier)
    monkeypatch.setattr(ring_end, "Membarrier", lambda: membarrier)
    monkeypatch.setattr(ring_end, "map_words", lambda buffer: RecordingWords(buffer, accesses, LINES))
    monkeypatch.setattr(ring_end, "NativeWords", lambda buffer: RecordingWords(buffer, accesses, names))
    monkeypatch.setattr(ring_end, "Futex", lambda: RecordingFutex(accesses))
    monkeypatch.setattr(ring_end, "_MIN_SPIN_ROUNDS", 0)
    segment = create_ring("test", capacity=256, num_readers=1)
    reader = RingReader(SharedSegment.attach(os.dup(segment.fd), segment.size), 0)
    writer = RingWriter(segment)
    with SharedSegment.attach(os.dup(segment.fd), segment.size) as third:
        flags = map_words(third.buffer[lines_bytes(1) - flags_bytes(1) : lines_bytes(1)])
        accesses.clear()
        yield Recorded(writer, reader, flags, accesses, has_flags)
        flags.close()
    writer.close()
    reader.close()


def test_the_code_publishes_and_reads_as_the_model(recorded: Recorded) -> None:
    writer, reader = recorded.writer, recorded.reader
    model = Model(num_records=1, has_flags=recorded.has_flags)
    if recorded.has_flags:
        recorded.flags.store(FLAG_OF_READER, 1)
        recorded.flags.store(FLAG_OF_WRITER, 1)

    writer.write(b"record")
    assert recorded.take() == accesses_of(model.publish("writer", "writer", 1))
    with reader.read(deadline_at=math.inf):
        assert recorded.take() == ["load writer.word"]
    assert recorded.take() == accesses_of(model.publish("reader", "reader0", 1))


def test_the_code_wakes_only_who_may_sleep(recorded: Recorded) -> None:
    def published(owner: str, flag: str) -> list[str]:
        return [f"store {owner}", f"load {flag}" if recorded.has_flags else f"wake {owner}"]

    recorded.writer.write(b"record")
    assert recorded.take() == published("writer.word", "reader0.flag")
    with recorded.reader.read(deadline_at=math.inf):
        recorded.take()
    assert recorded.take() == published("reader0.word", "writer.flag")


def test_the_code_waits_as_the_model(recorded: Recorded) -> None:
    writer, reader = recorded.writer, recorded.reader
    model = Model(num_records=1, has_flags=recorded.has_flags)

    with pytest.raises(Asleep):
        reader.acquire(deadline_at=math.inf)
    look, *wait = recorded.take()
    lowered = ["store reader0.flag"] if recorded.has_flags else []
    assert look == "load writer.word"
    assert wait == accesses_of(model.wait("reader", "reader0", "writer", 1, "record")) + lowered

    writer.write(bytes(100))
    writer.write(bytes(100))
    recorded.take()
    with pytest.raises(Asleep):
        writer.write(bytes(100), deadline_at=math.inf)
    look, *wait = recorded.take()
    lowered = ["store writer.flag"] if recorded.has_flags else []
    assert look == "load reader0.word"
    assert wait == accesses_of(model.wait("writer", "writer", "reader0", 1, "room")) + lowered


def test_the_code_closes_as_the_model(recorded: Recorded) -> None:
    model = Model(num_records=1)

    recorded.writer.close()
    assert recorded.take() == accesses_of(model.close("writer", "writer", 1))
    recorded.reader.close()
    assert recorded.take() == accesses_of(model.close("reader", "reader0", 1))
