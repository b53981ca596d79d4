"""Explores every execution of small programs on two machines, with a kernel that sleeps and wakes.

A program is a list of operations on shared locations (all 0 at first) and registers of its own. `explore` walks
through all states that its threads can reach together, and raises `Violation` with the way to a state where a check
fails or where nobody can go on.

TSO (x86-64): each thread has one store buffer; stores leave it in order, at any time. Loads are performed in order and
see the own buffer first.

ARM (aarch64, and a little weaker): stores to different locations leave the buffer in any order, but a release store
only after all earlier ones. A plain load may be performed early, across branches too, but not before an earlier acquire
load; or late, after later accesses, but not after a release store or the first use of what it loads. Accesses to one
location stay in order. An acquire load may overtake an earlier release store.

On both a fence waits for all earlier accesses. What the kernel does in one operation is done in memory at once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

Registers = dict[str, int]


class Machine(Enum):
    """Which machine's memory."""

    TSO = "tso"
    ARM = "arm"


@dataclass(frozen=True)
class Load:
    """register := location."""

    register: str
    location: str
    acquire: bool = False


@dataclass(frozen=True)
class Store:
    """location := value."""

    location: str
    value: int
    release: bool = False


@dataclass(frozen=True)
class Fence:
    """All earlier accesses are performed before all later ones."""


@dataclass(frozen=True)
class RemoteFence:
    """The kernel has thread number `thread` pass a fence, between any two of its accesses."""

    thread: int


@dataclass(frozen=True)
class KernelStore:
    """location := value, in memory at once: something that the kernel does under a lock."""

    location: str
    value: int


@dataclass(frozen=True)
class Sleep:
    """Go on only when memory holds `value` at `location`."""

    location: str
    value: int


@dataclass(frozen=True)
class Jump:
    """Go to `label` when `condition` holds for the registers of `uses`."""

    label: str
    uses: tuple[str, ...]
    condition: Callable[[Registers], bool]


@dataclass(frozen=True)
class Check:
    """Must hold when the thread comes here."""

    what: str
    uses: tuple[str, ...]
    condition: Callable[[Registers], bool]


@dataclass(frozen=True)
class Label:
    """A place to jump to."""

    name: str


Operation = Load | Store | Fence | RemoteFence | KernelStore | Sleep | Jump | Check | Label
Program = Sequence[Operation]


class Violation(Exception):
    """An execution that must not be."""


@dataclass(frozen=True, slots=True)
class _Thread:
    """Where one thread is.

    buffer: stores that memory has not seen (location, value, is_release), oldest first
    early:  what loads to come have seen (location, value)
    late:   loads that are not performed yet (register, location)
    """

    at: int = 0
    registers: tuple[tuple[str, int], ...] = ()
    buffer: tuple[tuple[str, int, bool], ...] = ()
    early: tuple[tuple[str, int], ...] = ()
    late: tuple[tuple[str, str], ...] = ()


_Memory = tuple[tuple[str, int], ...]
_State = tuple[_Memory, tuple[_Thread, ...]]


def explore(programs: Sequence[Program], machine: Machine, *, max_states: int = 2_000_000) -> int:
    """Walk through all executions. Returns the number of states. Raises Violation."""
    explorer = _Explorer(programs, machine)
    first: _State = ((), tuple(explorer._settled(number, _Thread()) for number in range(len(programs))))
    seen = {first}
    todo = [first]
    while todo:
        state = todo.pop()
        successors = list(explorer.successors(state))
        if not successors and not explorer.is_over(state):
            raise Violation(f"nobody can go on: {explorer.describe(state)}")
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                todo.append(successor)
        assert len(seen) < max_states, "too many states: make the programs smaller"
    return len(seen)


class _Explorer:
    def __init__(self, programs: Sequence[Program], machine: Machine) -> None:
        self._programs = [list(program) for program in programs]
        self._is_weak = machine is Machine.ARM
        self._labels = [
            {op.name: at for at, op in enumerate(program) if isinstance(op, Label)}
            for program in self._programs
        ]
        self._ahead = [
            [self._plain_loads_ahead(number, at) for at in range(len(program) + 1)]
            for number, program in enumerate(self._programs)
        ]

        self._live = [self._live_registers(number) for number in range(len(programs))]

    def is_over(self, state: _State) -> bool:
        """True when every thread is at its end."""
        return all(
            thread.at == len(program) for thread, program in zip(state[1], self._programs, strict=True)
        )

    def describe(self, state: _State) -> str:
        """Say where everybody is."""
        memory, threads = state
        places = [
            str(program[thread.at]) if thread.at < len(program) else "over"
            for thread, program in zip(threads, self._programs, strict=True)
        ]
        return f"memory {dict(memory)}, threads at {places}"

    def successors(self, state: _State) -> Iterator[_State]:
        """Yield every state that one step of one thread, or of its buffer, leads to."""
        memory, threads = state
        for number, thread in enumerate(threads):
            for new_memory, new_thread in self._steps(number, thread, memory):
                settled = self._settled(number, new_thread)
                yield new_memory, (*threads[:number], settled, *threads[number + 1 :])
            fenced = self._remote_fence(number, thread, threads)
            if fenced is not None:
                yield memory, fenced

    def _steps(self, number: int, thread: _Thread, memory: _Memory) -> Iterator[tuple[_Memory, _Thread]]:
        for index in self._ready_stores(thread.buffer):
            location, value, _ = thread.buffer[index]
            rest = thread.buffer[:index] + thread.buffer[index + 1 :]
            yield _put(memory, location, value), _replaced(thread, buffer=rest)
        for index, (register, location) in enumerate(thread.late):
            rest_late = thread.late[:index] + thread.late[index + 1 :]
            registers = _put(thread.registers, register, _seen(thread, memory, location))
            yield memory, _replaced(thread, registers=registers, late=rest_late)
        if self._is_weak:
            early = dict(thread.early)
            for location in self._ahead[number][thread.at]:
                if location not in early:
                    value = _seen(thread, memory, location)
                    yield memory, _replaced(thread, early=_put(thread.early, location, value))
        yield from self._next_operation(number, thread, memory)

    def _remote_fence(
        self, number: int, thread: _Thread, threads: tuple[_Thread, ...]
    ) -> tuple[_Thread, ...] | None:
        """Return the threads after the RemoteFence at which one stands; None when it stands at none, or must wait."""
        program = self._programs[number]
        operation = program[thread.at] if thread.at < len(program) else None
        if not isinstance(operation, RemoteFence):
            return None
        other = threads[operation.thread]
        if other.buffer or other.late:
            return None
        changed = list(threads)
        changed[operation.thread] = _replaced(other, early=())
        changed[number] = self._settled(number, _replaced(thread, at=thread.at + 1))
        return tuple(changed)

    def _settled(self, number: int, thread: _Thread) -> _Thread:
        """Go on to the next access: what concerns the thread alone needs no place of its own among the others."""
        program = self._programs[number]
        late = {register for register, _ in thread.late}
        at = thread.at
        registers = dict(thread.registers)
        while at < len(program):
            operation = program[at]
            if isinstance(operation, Label):
                at += 1
                continue
            if not isinstance(operation, Jump | Check) or not late.isdisjoint(operation.uses):
                break
            holds = operation.condition(registers)
            if isinstance(operation, Check):
                if not holds:
                    raise Violation(f"{operation.what}: {registers}")
                at += 1
            else:
                at = self._labels[number][operation.label] if holds else at + 1
        ahead = self._ahead[number][at]
        early = tuple(pair for pair in thread.early if pair[0] in ahead)
        # What is not used any more must not tell states apart.
        live = self._live[number][at]
        return _replaced(
            thread, at=at, early=early, registers=tuple(pair for pair in thread.registers if pair[0] in live)
        )

    def _ready_stores(self, buffer: tuple[tuple[str, int, bool], ...]) -> list[int]:
        if not buffer:
            return []
        if not self._is_weak:
            return [0]
        ready = []
        locations: set[str] = set()
        for index, (location, _, is_release) in enumerate(buffer):
            if location not in locations and (not is_release or index == 0):
                ready.append(index)
            locations.add(location)
        return ready

    def _next_operation(
        self, number: int, thread: _Thread, memory: _Memory
    ) -> Iterator[tuple[_Memory, _Thread]]:
        program = self._programs[number]
        if thread.at == len(program):
            return
        operation = program[thread.at]
        following = thread.at + 1
        waits_for = {register for register, _ in thread.late}
        late_locations = {location for _, location in thread.late}
        match operation:
            case Label() | Jump() | Check():  # waits for a late load
                return
            case RemoteFence():  # concerns two threads: see _remote_fence
                return
            case Load():
                if operation.location not in late_locations and operation.register not in waits_for:
                    yield from self._load(operation, thread, memory, following)
            case Store():
                if operation.location in late_locations or (operation.release and thread.late):
                    return
                entry = (operation.location, operation.value, operation.release)
                yield (
                    memory,
                    _replaced(
                        thread,
                        at=following,
                        buffer=(*thread.buffer, entry),
                        early=_without(thread.early, operation.location),
                    ),
                )
            case Fence():
                if not thread.buffer and not thread.late:
                    yield memory, _replaced(thread, at=following, early=())
            case KernelStore():
                yield _put(memory, operation.location, operation.value), _replaced(thread, at=following)
            case Sleep():
                is_stored = all(location != operation.location for location, _, _ in thread.buffer)
                if is_stored and dict(memory).get(operation.location, 0) == operation.value:
                    yield memory, _replaced(thread, at=following)
            case _:
                assert_never(operation)

    def _load(
        self, load: Load, thread: _Thread, memory: _Memory, following: int
    ) -> Iterator[tuple[_Memory, _Thread]]:
        early = () if load.acquire else _without(thread.early, load.location)
        registers = _put(thread.registers, load.register, _seen(thread, memory, load.location))
        yield memory, _replaced(thread, at=following, registers=registers, early=early)
        if load.acquire or not self._is_weak:
            return
        for location, value in thread.early:
            if location == load.location:
                registers = _put(thread.registers, load.register, value)
                yield memory, _replaced(thread, at=following, registers=registers, early=early)
        yield (
            memory,
            _replaced(thread, at=following, early=early, late=(*thread.late, (load.register, load.location))),
        )

    def _live_registers(self, number: int) -> list[frozenset[str]]:
        """Return, for each place, the registers that may be used from there on before they are loaded again."""
        program = self._programs[number]
        live: list[frozenset[str]] = [frozenset()] * (len(program) + 1)
        is_stable = False
        while not is_stable:
            is_stable = True
            for at in reversed(range(len(program))):
                operation = program[at]
                after = live[at + 1]
                if isinstance(operation, Jump):
                    after |= live[self._labels[number][operation.label]]
                if isinstance(operation, Load):
                    after -= {operation.register}
                if isinstance(operation, Jump | Check):
                    after |= frozenset(operation.uses)
                if after != live[at]:
                    live[at], is_stable = after, False
        return live

    def _plain_loads_ahead(self, number: int, start: int) -> frozenset[str]:
        """Return what may be loaded early at `start`: no acquire load and no fence stands before it."""
        found: set[str] = set()
        todo, seen = [start], set()
        program = self._programs[number]
        while todo:
            at = todo.pop()
            if at in seen or at == len(program):
                continue
            seen.add(at)
            operation = program[at]
            if isinstance(operation, Fence) or (isinstance(operation, Load) and operation.acquire):
                continue
            if isinstance(operation, Load):
                found.add(operation.location)
            if isinstance(operation, Jump):
                todo.append(self._labels[number][operation.label])
            todo.append(at + 1)
        return frozenset(found)


def _replaced(
    thread: _Thread,
    *,
    at: int | None = None,
    registers: tuple[tuple[str, int], ...] | None = None,
    buffer: tuple[tuple[str, int, bool], ...] | None = None,
    early: tuple[tuple[str, int], ...] | None = None,
    late: tuple[tuple[str, str], ...] | None = None,
) -> _Thread:
    return _Thread(
        thread.at if at is None else at,
        thread.registers if registers is None else registers,
        thread.buffer if buffer is None else buffer,
        thread.early if early is None else early,
        thread.late if late is None else late,
    )


def _put(values: tuple[tuple[str, int], ...], name: str, value: int) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((*_without(values, name), (name, value))))


def _without(values: tuple[tuple[str, int], ...], name: str) -> tuple[tuple[str, int], ...]:
    return tuple(pair for pair in values if pair[0] != name)


def _seen(thread: _Thread, memory: _Memory, location: str) -> int:
    """Return what a load of the thread sees now."""
    for stored_location, value, _ in reversed(thread.buffer):
        if stored_location == location:
            return value
    return dict(memory).get(location, 0)
