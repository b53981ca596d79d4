"""The ring's protocol as programs for memory_model.py, and every way to leave out a part of it.

Each step below is a step of the code, in its order; test_ring_model.py has the code's own accesses compared with them.

  step                          in the model                        in the code
  look for room                 load reader's word, acquire         RingWriter._wait_released
  copy in                       store data, plain                   RingWriter.write: data[position:end] = ...
  publish, release              store word, release                 RingEnd._advance
                                load the others' flags, plain       RingEnd._advance: _others_flags
                                wake, when one is up                RingEnd._advance: _wake()
  look for a record             load writer's word, acquire         RingReader.locate
  copy out, decode              load data, plain                    who was told where by RingReader.locate
  wait                          own flag := 1, plain                RingEnd._wait_past: _flags[...] = 1
                                fence for all                       RingEnd._wait_past: Membarrier.issue
                                load word, acquire                  RingEnd._wait_past
                                sleep                               RingEnd._wait_past: Futex.wait
                                own flag := 0, plain                RingEnd._wait_past: _flags[...] = 0
  close                         store word, release                 RingEnd.close
                                wake                                RingEnd.close: _wake()
  ring a bell                   fence, bell := 1                    RingWriter._publish: eventfd_write
  wait for a bell               sleep until bell = 1, bell := 0     WorkerGroup.wait_bell: poll, eventfd_read

Where the kernel has no fence for all, nobody touches a flag, and publishing always wakes: `has_flags` is False then.

The kernel: the fence for all is one of the caller, then one of each other thread, anywhere in it, then one of the
caller. FUTEX_WAIT queues its caller, has a barrier, looks at the word, and sleeps or leaves the queue; FUTEX_WAKE
has a barrier, looks for somebody in the queue, and wakes. There are no timeouts here: in the code, a wait that ends by
its slice would hide a lost wake-up for a quarter of a second; here it shows.

A record is one slot, a cursor counts records; a word is twice the cursor, and one more when its owner has closed.
Padding is data like any other: it is published by the same cursor. An end reads its own word only as it left it, so
the load in RingEnd.close is none here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .memory_model import (
    Check,
    Fence,
    Jump,
    KernelStore,
    Label,
    Load,
    Operation,
    Program,
    RemoteFence,
    Sleep,
    Store,
)

Condition = Callable[[dict[str, int]], bool]
"""A question about registers, which are 0 before their first load."""

FENCES = ("writer publishes", "reader publishes", "reader looks", "reader waits")
"""Each makes one load or store plain."""
IMPLIED_FENCES = ("writer looks", "writer waits", "closes")
"""As FENCES, but something else orders these too. What a writer has loaded decides, by a branch, whether it stores, and
no machine stores before it knows. A closing tells of no more than the publication before it did, in the same word."""
BARRIERS = ("kernel: wait", "kernel: wake")
ALL_FENCES = ("for all: others", "for all: own")
"""Halves of the fence for all: that of the other threads, and the caller's."""
FLAGS = ("flag: raised", "flag: looked at last")
WAKES = ("wake: writer publishes", "wake: reader publishes", "wake: writer closes", "wake: reader closes")
ORDERS = ("wake before word", "asleep on what was looked at")
BELLS = ("bell: rings", "bell: rings first", "bell: silenced last", "bell: barrier")


@dataclass(frozen=True)
class Model:
    """Builds the programs, without what `without` names."""

    num_records: int
    num_slots: int = 1
    num_readers: int = 1
    has_flags: bool = True
    without: frozenset[str] = frozenset()

    def programs(self, *, num_read: int | None = None) -> list[Program]:
        """Return the writer and all readers; `num_read` as in `reader`."""
        return [
            self.writer(),
            *(self.reader(index, num_read=num_read) for index in range(self.num_readers)),
        ]

    def bell_programs(self) -> list[Program]:
        """Return two writers of rings of their own, and one who waits for both by a bell."""
        return [self.ringer("left"), self.ringer("right"), self.listener(("left", "right"))]

    def writer(self) -> Program:
        """Write all records, each when there is room, then close; end early when a reader has closed."""
        program: list[Operation] = []
        for number in range(1, self.num_records + 1):
            for reader in range(self.num_readers):
                place = f"room{number}.{reader}"
                program += self._look("writer", "writer", f"reader{reader}", number - self.num_slots, place)
            program.append(Store(f"data{number % self.num_slots}", number))
            program += self.publish("writer", "writer", number)
        return [*program, *self.close("writer", "writer", self.num_records), Label("end")]

    def reader(self, index: int, *, num_read: int | None = None) -> Program:
        """Read until the writer closes, or `num_read` records; then close."""
        name = f"reader{index}"
        last = self.num_records if num_read is None else num_read
        program: list[Operation] = []
        for number in range(1, last + 1):
            program += self._look("reader", name, "writer", number, f"record{number}", ends_early=False)
            program.append(Load("data", f"data{number % self.num_slots}"))
            program += self.publish("reader", name, number)
            program.append(Check(f"record {number} is whole", ("data",), _is("data", number)))
        if num_read is None:
            program += self._look("reader", name, "writer", last + 1, "more")
            program.append(Check("no record comes after the last", (), lambda _: False))
        return [*program, Label("end"), *self.close("reader", name, last)]

    def ringer(self, name: str) -> Program:
        """Publish one record to who waits for a bell."""
        publish = self.publish("writer", name, 1)
        ring = self._only("bell: rings", [*self._only("bell: barrier", [Fence()]), KernelStore("bell", 1)])
        return [*ring, *publish] if "bell: rings first" in self.without else [*publish, *ring]

    def listener(self, names: tuple[str, ...]) -> Program:
        """Wait by the bell until every ring of `names` has its record."""
        looks: list[Operation] = [Load(name, _word(name), acquire=True) for name in names]
        done = Jump("end", names, lambda registers: all(registers[name] for name in names))
        silence: list[Operation] = [KernelStore("bell", 0), Fence()]
        if "bell: silenced last" in self.without:
            return [Label("loop"), *looks, done, *silence, Sleep("bell", 1), _goto("loop"), Label("end")]
        return [Label("loop"), *looks, done, Sleep("bell", 1), *silence, _goto("loop"), Label("end")]

    def publish(self, side: str, owner: str, number: int) -> list[Operation]:
        """Make a cursor known: what a writer does with a record, and a reader with room."""
        word = self._store(f"{side} publishes", _word(owner), 2 * number)
        wake = self._wake(f"wake: {side} publishes", owner)
        if not self.has_flags:
            return [*wake, word] if "wake before word" in self.without else [word, *wake]
        flags = [_flag(sleeper) for sleeper in self._sleepers(owner)]
        place = f"{owner} {number}"
        look: list[Operation] = [Load(flag, flag) for flag in flags]
        wake = [
            Jump(
                f"{place} nobody", tuple(flags), lambda registers: not any(registers[flag] for flag in flags)
            ),
            *wake,
            Label(f"{place} nobody"),
        ]
        if "wake before word" in self.without:
            return [*look, *wake, word]
        if "flag: looked at last" in self.without:
            return [*look, word, *wake]
        return [word, *look, *wake]

    def close(self, side: str, owner: str, cursor: int) -> list[Operation]:
        """Close an end whose cursor stands at `cursor`."""
        word = self._store("closes", _word(owner), 2 * cursor + 1)
        return [word, *self._wake(f"wake: {side} closes", owner)]

    def wait(self, side: str, name: str, owner: str, needed: int, place: str) -> list[Operation]:
        """Have `name` wait until `owner`'s cursor has come to `needed`, or go to "end" when it has closed before."""
        seen = _seen(owner)
        lowered: list[Operation] = [Store(_flag(name), 0)] if self.has_flags else []
        return [
            *self._raise_flag(name),
            Label(f"{place} wait"),
            self._load(f"{side} waits", seen, _word(owner)),
            Jump(f"{place} came", (seen,), _has_come(seen, needed)),
            Jump("end", (seen,), _has_closed(seen)),
            *self._sleep(name, owner, place),
            _goto(f"{place} wait"),
            Label(f"{place} came"),
            *lowered,
        ]

    def _look(
        self, side: str, name: str, owner: str, needed: int, place: str, *, ends_early: bool = True
    ) -> list[Operation]:
        """Go on when `owner`'s cursor is known to have come to `needed`, else look at it, else wait."""
        seen = _seen(owner)
        there = Jump(f"{place} there", (seen,), _has_come(seen, needed))
        wait = self.wait(side, name, owner, needed, place)
        if not ends_early:
            # A record that was published before the closing is never missed.
            at = next(i for i, op in enumerate(wait) if isinstance(op, Jump) and op.label == "end")
            is_open = Check("the closing is not seen before the last record", (seen,), _is_open(seen))
            wait[at] = is_open
        return [
            there,
            self._load(f"{side} looks", seen, _word(owner)),
            there,
            *wait,
            Label(f"{place} there"),
        ]

    def _raise_flag(self, name: str) -> list[Operation]:
        """Say that `name` is about to sleep: who does not see it has published before its next look."""
        if not self.has_flags:
            return []
        own = self._only("for all: own", [Fence()])
        # The order of `programs`.
        threads = ["writer", *(f"reader{index}" for index in range(self.num_readers))]
        others: list[Operation] = [
            RemoteFence(number) for number, thread in enumerate(threads) if thread != name
        ]
        raised = self._only("flag: raised", [Store(_flag(name), 1)])
        return [*raised, *own, *self._only("for all: others", others), *own]

    def _sleepers(self, owner: str) -> list[str]:
        """Return who may sleep on `owner`'s word."""
        readers = [f"reader{index}" for index in range(self.num_readers)]
        return ["writer"] if owner in readers else readers

    def _sleep(self, name: str, owner: str, place: str) -> list[Operation]:
        """FUTEX_WAIT on `owner`'s word. One queue for each pair of sleeper and word."""
        queue = f"{owner}.queue.{name}"
        seen = _seen(owner)
        expected: list[Operation] = []
        if "asleep on what was looked at" in self.without:
            expected = [self._load("again", seen, _word(owner))]
        return [
            *expected,
            Store(queue, 1),
            *self._only("kernel: wait", [Fence()]),
            Load("now", _word(owner)),
            Jump(f"{place} asleep", ("now", seen), lambda registers: registers["now"] == registers[seen]),
            Store(queue, 0),
            _goto(f"{place} wait"),
            Label(f"{place} asleep"),
            Sleep(queue, 0),
        ]

    def _wake(self, name: str, owner: str) -> list[Operation]:
        """FUTEX_WAKE on `owner`'s word."""
        barrier = self._only("kernel: wake", [Fence()])
        woken = [KernelStore(f"{owner}.queue.{who}", 0) for who in self._sleepers(owner)]
        return self._only(name, [*barrier, *woken])

    def _only(self, name: str, operations: list[Operation]) -> list[Operation]:
        return [] if name in self.without else operations

    def _load(self, name: str, register: str, location: str) -> Load:
        return Load(register, location, acquire=name not in self.without)

    def _store(self, name: str, location: str, value: int) -> Store:
        return Store(location, value, release=name not in self.without)


def _word(owner: str) -> str:
    return f"{owner}.word"


def _flag(owner: str) -> str:
    return f"{owner}.flag"


def _seen(owner: str) -> str:
    return f"seen {owner}"


def _is(register: str, value: int) -> Condition:
    return lambda registers: registers.get(register, 0) == value


def _has_come(register: str, cursor: int) -> Condition:
    return lambda registers: registers.get(register, 0) >> 1 >= cursor


def _has_closed(register: str) -> Condition:
    return lambda registers: registers.get(register, 0) & 1 == 1


def _is_open(register: str) -> Condition:
    return lambda registers: registers.get(register, 0) & 1 == 0


def _goto(label: str) -> Jump:
    return Jump(label, (), lambda _: True)
