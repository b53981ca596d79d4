"""The ring's protocol over all its interleavings, on two machines; and without each of its parts, which must show.

The last tests hold the model to the code: the same accesses in the same order. What a real machine of the weaker kind
does was never seen: there was none to run this on.
"""

import math
import os
from collections.abc import Callable, Iterator

import pytest

from phalanx.shm import ring_end
from phalanx.shm.ordering import Words, map_words
from phalanx.shm.ring_buffer import RingReader, RingWriter, create_ring
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
    Sleep,
    Store,
    Violation,
    explore,
)
from support.ring_model import BARRIERS, BELLS, FENCES, IMPLIED_FENCES, ORDERS, WAKES, Model

Scenario = Callable[[frozenset[str]], list[Program]]


def one_slot(without: frozenset[str]) -> list[Program]:
    """Both ends wait for each other; the slot is used again; the writer closes."""
    return Model(num_records=2, without=without).programs()


def two_slots(without: frozenset[str]) -> list[Program]:
    """As one_slot; what an end knows of the other's cursor spares it a look."""
    return Model(num_records=3, num_slots=2, without=without).programs()


def reader_leaves(without: frozenset[str]) -> list[Program]:
    """The reader closes while the writer waits for room."""
    return Model(num_records=3, without=without).programs(num_read=1)


def two_readers_leave(without: frozenset[str]) -> list[Program]:
    """Two readers of one record each."""
    return Model(num_records=1, num_readers=2, without=without).programs(num_read=1)


def two_readers(without: frozenset[str]) -> list[Program]:
    """Two readers, until the writer closes."""
    return Model(num_records=1, num_readers=2, without=without).programs()


def bell(without: frozenset[str]) -> list[Program]:
    """Two rings, and one who waits for both."""
    return Model(num_records=1, without=without).bell_programs()


SCENARIOS: list[Scenario] = [one_slot, two_slots, reader_leaves, bell]


def violates(scenario: Scenario, machine: Machine, *without: str) -> bool:
    try:
        explore(scenario(frozenset(without)), machine)
    except Violation:
        return True
    return False


@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize(
    "scenario",
    [
        *SCENARIOS,
        pytest.param(two_readers_leave, marks=pytest.mark.full),
        pytest.param(two_readers, marks=pytest.mark.full),
    ],
)
def test_every_interleaving_delivers_everything_and_ends(scenario: Scenario, machine: Machine) -> None:
    num_states = explore(scenario(frozenset()), machine)

    assert num_states > 200


@pytest.mark.parametrize("fence", FENCES)
def test_a_missing_fence_is_found_where_the_machine_reorders(fence: str) -> None:
    assert violates(one_slot, Machine.ARM, fence)
    assert not violates(one_slot, Machine.TSO, fence)


@pytest.mark.parametrize("fence", IMPLIED_FENCES)
def test_a_fence_that_something_else_implies_can_be_missing(fence: str) -> None:
    for scenario in (one_slot, reader_leaves, bell):
        assert not violates(scenario, Machine.ARM, fence)


def test_a_bell_needs_its_barrier_when_no_wake_up_stands_before_it() -> None:
    assert violates(bell, Machine.TSO, "bell: barrier", "kernel: wake")
    assert not violates(bell, Machine.TSO, "kernel: wake")


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
    assert violates(lambda _: message_passing(release=release, acquire=acquire), machine) is not is_safe


@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_store_passes_a_later_load_on_both_unless_there_is_a_fence(
    machine: Machine, is_fenced: bool
) -> None:
    def programs(_: frozenset[str]) -> list[Program]:
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
        judge: list[Operation] = [
            Sleep("x over", 1),
            Sleep("y over", 1),
            Load("x", "x missed"),
            Load("y", "y missed"),
            Check("one of them saw the other", ("x", "y"), lambda seen: seen["x"] + seen["y"] < 2),
        ]
        return [*ends, judge]

    assert violates(programs, machine) is not is_fenced


def _labelled(name: str) -> list[Operation]:
    return [Label(name)]


# The code makes the model's accesses ----------------------------------------------------------------------------


class Asleep(Exception):
    """Instead of a sleep."""


class RecordingWords:
    """Words that tell of every access to a line of a ring with one reader."""

    def __init__(self, buffer: memoryview, accesses: list[str]) -> None:
        self._words: Words = map_words(buffer)
        self._accesses = accesses

    def load(self, index: int) -> int:
        self._accesses.append(f"load {name_of(index)}")
        return self._words.load(index)

    def store(self, index: int, value: int) -> None:
        self._accesses.append(f"store {name_of(index)}")
        self._words.store(index, value)

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
            self._accesses.append(f"wake {name_of(address // 8)}")
            return 0

        return wake

    def wait(self, address: int, expected: int, timeout_s: float) -> bool:
        self._accesses.append(f"sleep {name_of(address // 8)}")
        raise Asleep


def name_of(index: int) -> str:
    return {8: "writer.word", 16: "reader0.word"}.get(index, "constant")


def accesses_of(program: list[Operation]) -> list[str]:
    """Return what the program does to the lines, up to its first sleep; what the kernel does inside is one access."""
    found = []
    for operation in program:
        match operation:
            case Load() if operation.register != "now":
                found.append(f"load {operation.location}")
            case Store() if ".queue" not in operation.location:
                found.append(f"store {operation.location}")
            case KernelStore():
                found.append(f"wake {operation.location.split('.')[0]}.word")
            case Sleep():
                return [*found, f"sleep {operation.location.split('.')[0]}.word"]
            case _:
                pass
    return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RingWriter, RingReader, list[str]]]:
    accesses: list[str] = []
    monkeypatch.setattr(ring_end, "map_words", lambda buffer: RecordingWords(buffer, accesses))
    monkeypatch.setattr(ring_end, "Futex", lambda: RecordingFutex(accesses))
    monkeypatch.setattr(ring_end, "_MIN_SPIN_ROUNDS", 0)
    segment = create_ring("test", capacity=256, num_readers=1)
    reader = RingReader(SharedSegment.attach(os.dup(segment.fd), segment.size), 0)
    writer = RingWriter(segment)
    accesses.clear()
    yield writer, reader, accesses
    writer.close()
    reader.close()


def test_the_code_publishes_and_reads_as_the_model(
    recorded: tuple[RingWriter, RingReader, list[str]],
) -> None:
    writer, reader, accesses = recorded
    model = Model(num_records=1)

    writer.write(b"record")
    assert accesses == accesses_of(model.publish("writer", "writer", 1))
    accesses.clear()
    with reader.read(deadline_at=math.inf):
        assert accesses == ["load writer.word"]
        accesses.clear()
    assert accesses == accesses_of(model.publish("reader", "reader0", 1))


def test_the_code_waits_as_the_model(recorded: tuple[RingWriter, RingReader, list[str]]) -> None:
    writer, reader, accesses = recorded
    model = Model(num_records=1)

    with pytest.raises(Asleep):
        reader.acquire(deadline_at=math.inf)
    look, *wait = accesses
    assert look == "load writer.word"
    assert wait == accesses_of(model.wait("reader", "reader0", "writer", 1, "record"))

    writer.write(bytes(100))
    writer.write(bytes(100))
    accesses.clear()
    with pytest.raises(Asleep):
        writer.write(bytes(100), deadline_at=math.inf)
    look, *wait = accesses
    assert look == "load reader0.word"
    assert wait == accesses_of(model.wait("writer", "writer", "reader0", 1, "room"))


def test_the_code_closes_as_the_model(recorded: tuple[RingWriter, RingReader, list[str]]) -> None:
    writer, reader, accesses = recorded
    model = Model(num_records=1)

    writer.close()
    assert accesses == accesses_of(model.close("writer", "writer", 1))
    accesses.clear()
    reader.close()
    assert accesses == accesses_of(model.close("reader", "reader0", 1))
