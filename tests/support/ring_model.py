"""The ring's protocol as programs for memory_model.py, and every way to leave out a part of it.

Each step below is a step of the code, in its order; test_ring_model.py has the code's own accesses compared with them.

  step                          in the model                        in the code
  look for room                 load reader's cursor, acquire       RingWriter._wait_released
  copy in                       store data, plain                   RingWriter.write: data[position:end] = ...
  publish, release              store cursor, release               RingEnd._advance
                                store event, release                RingEnd._advance
                                wake                                RingEnd._advance: _wake()
  look for a record             load writer's cursor, acquire       RingReader.acquire
  copy out, decode              load data, plain                    who holds the view of RingReader.acquire
  wait                          load event, acquire                 RingEnd._wait_past
                                load closed, acquire                RingEnd._wait_past
                                load cursor, acquire                RingEnd._wait_past
                                sleep                               RingEnd._wait_past: Futex.wait
  close                         store closed, release               RingEnd.close
                                store event, release                RingEnd.close
                                wake                                RingEnd.close: _wake()
  ring a bell                   fence, bell := 1                    RingWriter._publish: eventfd_write
  wait for a bell               sleep until bell = 1, bell := 0     WorkerGroup.wait_bell: poll, eventfd_read

The kernel: FUTEX_WAIT queues its caller, has a barrier, looks at the word, and sleeps or leaves the queue; FUTEX_WAKE
has a barrier, looks for somebody in the queue, and wakes. There are no timeouts here: in the code, a wait that ends by
its slice would hide a lost wake-up for a quarter of a second; here it shows.

A record is one slot, a cursor counts records. Padding is data like any other: it is published by the same cursor.
"""

from dataclasses import dataclass

from .memory_model import Check, Fence, Jump, KernelStore, Label, Load, Operation, Program, Sleep, Store

FENCES = (
    "writer publishes cursor",
    "writer publishes event",
    "reader publishes cursor",
    "reader publishes event",
    "reader looks at cursor",
    "reader waits: event",
    "reader waits: closed",
    "reader waits: cursor",
    "writer waits: event",
)
"""Each makes one load or store plain."""
IMPLIED_FENCES = (
    "writer looks at cursor",
    "writer waits: cursor",
    "writer waits: closed",
    "closed",
    "bell: barrier",
)
"""As FENCES, but something else orders these too. What a writer has loaded decides, by a branch, whether it stores, and
no machine stores before it knows. A writer that is told of a reader's closing needs not be told of the room it left.
Before a closing and before a bell stands the barrier of a wake-up, and after a closing the release of its event."""
BARRIERS = ("kernel: wait", "kernel: wake")
WAKES = ("wake: writer publishes", "wake: reader publishes", "wake: writer closes", "wake: reader closes")
ORDERS = (
    "event before cursor",
    "wake before event",
    "cursor looked at before event",
    "closed looked at last",
)
BELLS = ("bell: rings", "bell: rings first", "bell: silenced last")


@dataclass(frozen=True)
class Model:
    """Builds the programs, without what `without` names."""

    num_records: int
    num_slots: int = 1
    num_readers: int = 1
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
        return [*program, *self.close("writer", "writer", self.num_records + 1), Label("end")]

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
        return [*program, Label("end"), *self.close("reader", name, last + 1)]

    def ringer(self, name: str) -> Program:
        """Publish one record to who waits for a bell."""
        publish = self.publish("writer", name, 1)
        ring = self._only("bell: rings", [*self._only("bell: barrier", [Fence()]), KernelStore("bell", 1)])
        return [*ring, *publish] if "bell: rings first" in self.without else [*publish, *ring]

    def listener(self, names: tuple[str, ...]) -> Program:
        """Wait by the bell until every ring of `names` has its record."""
        looks: list[Operation] = [Load(name, f"{name}.cursor", acquire=True) for name in names]
        done = Jump("end", names, lambda registers: all(registers[name] for name in names))
        silence: list[Operation] = [KernelStore("bell", 0), Fence()]
        if "bell: silenced last" in self.without:
            return [Label("loop"), *looks, done, *silence, Sleep("bell", 1), _goto("loop"), Label("end")]
        return [Label("loop"), *looks, done, Sleep("bell", 1), *silence, _goto("loop"), Label("end")]

    def publish(self, side: str, owner: str, number: int) -> list[Operation]:
        """Make a cursor known: what a writer does with a record, and a reader with room."""
        cursor = self._store(f"{side} publishes cursor", f"{owner}.cursor", number)
        event = self._store(f"{side} publishes event", f"{owner}.event", number)
        wake = self._wake(f"wake: {side} publishes", owner)
        if "event before cursor" in self.without:
            return [event, cursor, *wake]
        if "wake before event" in self.without:
            return [cursor, *wake, event]
        return [cursor, event, *wake]

    def close(self, side: str, owner: str, event: int) -> list[Operation]:
        """Close an end."""
        return [
            self._store("closed", f"{owner}.closed", 1),
            self._store(f"{side} publishes event", f"{owner}.event", event),
            *self._wake(f"wake: {side} closes", owner),
        ]

    def wait(self, side: str, name: str, owner: str, needed: int, place: str) -> list[Operation]:
        """Have `name` wait until `owner`'s cursor has come to `needed`, or go to "end" when it has closed before."""
        event = self._load(f"{side} waits: event", "event", f"{owner}.event")
        closed = self._load(f"{side} waits: closed", "closed", f"{owner}.closed")
        cursor = self._load(f"{side} waits: cursor", _seen(owner), f"{owner}.cursor")
        looks = [event, closed, cursor]
        if "cursor looked at before event" in self.without:
            looks = [cursor, event, closed]
        if "closed looked at last" in self.without:
            looks = [event, cursor, closed]
        return [
            Label(f"{place} wait"),
            *looks,
            Jump(f"{place} there", (_seen(owner),), _at_least(_seen(owner), needed)),
            Jump("end", ("closed",), _is("closed", 1)),
            *self._sleep(name, owner, place),
            _goto(f"{place} wait"),
        ]

    def _look(
        self, side: str, name: str, owner: str, needed: int, place: str, *, ends_early: bool = True
    ) -> list[Operation]:
        """Go on when `owner`'s cursor is known to have come to `needed`, else look at it, else wait."""
        there = Jump(f"{place} there", (_seen(owner),), _at_least(_seen(owner), needed))
        wait = self.wait(side, name, owner, needed, place)
        if not ends_early:
            # A record that was published before the closing is never missed.
            at = next(i for i, op in enumerate(wait) if isinstance(op, Jump) and op.label == "end")
            wait[at] = Check("the closing is not seen before the last record", ("closed",), _is("closed", 0))
        return [
            there,
            self._load(f"{side} looks at cursor", _seen(owner), f"{owner}.cursor"),
            there,
            *wait,
            Label(f"{place} there"),
        ]

    def _sleep(self, name: str, owner: str, place: str) -> list[Operation]:
        """FUTEX_WAIT on `owner`'s event. One queue for each pair of sleeper and word."""
        queue = f"{owner}.queue.{name}"
        return [
            Store(queue, 1),
            *self._only("kernel: wait", [Fence()]),
            Load("now", f"{owner}.event"),
            Jump(
                f"{place} asleep", ("now", "event"), lambda registers: registers["now"] == registers["event"]
            ),
            Store(queue, 0),
            _goto(f"{place} wait"),
            Label(f"{place} asleep"),
            Sleep(queue, 0),
        ]

    def _wake(self, name: str, owner: str) -> list[Operation]:
        """FUTEX_WAKE on `owner`'s event."""
        readers = [f"reader{index}" for index in range(self.num_readers)]
        sleepers = readers if owner == "writer" else ["writer"]
        barrier = self._only("kernel: wake", [Fence()])
        return self._only(name, [*barrier, *(KernelStore(f"{owner}.queue.{who}", 0) for who in sleepers)])

    def _only(self, name: str, operations: list[Operation]) -> list[Operation]:
        return [] if name in self.without else operations

    def _load(self, name: str, register: str, location: str) -> Load:
        return Load(register, location, acquire=name not in self.without)

    def _store(self, name: str, location: str, value: int) -> Store:
        return Store(location, value, release=name not in self.without)


def _seen(owner: str) -> str:
    return f"seen {owner}"


def _is(register: str, value: int) -> "Condition":
    return Condition(register, value, exactly=True)


def _at_least(register: str, value: int) -> "Condition":
    return Condition(register, value, exactly=False)


@dataclass(frozen=True)
class Condition:
    """A comparison of a register, 0 before its first load, with a number."""

    register: str
    value: int
    exactly: bool

    def __call__(self, registers: dict[str, int]) -> bool:
        known = registers.get(self.register, 0)
        return known == self.value if self.exactly else known >= self.value


def _goto(label: str) -> Jump:
    return Jump(label, (), lambda _: True)
