"""Runs threads one at a time, in an order drawn from a seed, on words as the weakest machine of ours shows them.

Each access to a word is a point at which another thread may go on. A store stays in its thread's store buffer for
a while, in order, seen by that thread alone (as on x86-64). A system call empties the buffer. A futex sleeps until
it is woken and never by time, so that a lost wake-up shows: nobody can run, and `Deadlock` is raised.
"""

import random
import threading
from collections.abc import Callable, Sequence

from phalanx.shm.ordering import Cells, Words, map_words


class Deadlock(Exception):
    """All threads that have not ended sleep."""


class Interleaving:
    """One run. Threads are known by their number, in the order of `run`'s bodies."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._turns: list[threading.Semaphore] = []
        self._runnable: list[int] = []
        self._sleepers: dict[int, int] = {}
        self._buffers: dict[int, list[tuple[Words, int, int]]] = {}
        self._words: list[Words] = []
        self._numbers = threading.local()
        self._error: BaseException | None = None
        self._is_over = threading.Event()

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run `bodies` to their end. Raises what one of them raised, or Deadlock."""
        self._turns = [threading.Semaphore(0) for _ in bodies]
        self._runnable = list(range(len(bodies)))
        self._buffers = {number: [] for number in self._runnable}
        threads = [
            threading.Thread(target=self._run_one, args=(number, body)) for number, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def point(self) -> None:
        """Let any thread go on from here; let any thread's oldest stores become visible."""
        number = self._number()
        for other in list(self._buffers):
            if self._random.random() < 0.3:
                self._drain(other, 1)
        self._pass_on()
        self._await_turn(number)

    def drain_own(self) -> None:
        """Make all stores of this thread visible."""
        self._drain(self._number(), len(self._buffers[self._number()]))

    def drain_all(self) -> None:
        """Make all stores of all threads visible."""
        for number, buffer in self._buffers.items():
            self._drain(number, len(buffer))

    def buffer(self) -> list[tuple[Words, int, int]]:
        """Return this thread's stores that nobody else sees yet, oldest first."""
        return self._buffers[self._number()]

    def sleep(self, address: int) -> None:
        """Sleep until `wake`."""
        number = self._number()
        self._runnable.remove(number)
        self._sleepers[number] = address
        self._pass_on()
        self._await_turn(number)

    def wake(self, address: int) -> int:
        """Let all go on who sleep on `address`."""
        woken = [number for number, where in self._sleepers.items() if where == address]
        for number in woken:
            del self._sleepers[number]
            self._runnable.append(number)
        return len(woken)

    def is_inside(self) -> bool:
        """True in a thread of this run; the setting up and the taking down are not interleaved."""
        return hasattr(self._numbers, "own")

    def _run_one(self, number: int, body: Callable[[], None]) -> None:
        self._numbers.own = number
        try:
            self._await_turn(number)
            body()
            self.drain_own()
        except BaseException as error:
            self._error = self._error or error
        if self._error is not None:
            for turn in self._turns:
                turn.release()
            return
        self._runnable.remove(number)
        if self._runnable or self._sleepers:
            self._pass_on()

    def _pass_on(self) -> None:
        if not self._runnable:
            self._error = Deadlock(f"threads {sorted(self._sleepers)} sleep for ever")
            for turn in self._turns:
                turn.release()
            return
        self._turns[self._random.choice(self._runnable)].release()

    def _await_turn(self, number: int) -> None:
        self._turns[number].acquire()
        if self._error is not None:
            raise self._error

    def _drain(self, number: int, count: int) -> None:
        buffer = self._buffers[number]
        for words, index, value in buffer[:count]:
            words.store(index, value)
        del buffer[:count]

    def _number(self) -> int:
        number: int = self._numbers.own
        return number


class BufferedWords:
    """Words with a store buffer per thread."""

    def __init__(self, interleaving: Interleaving, buffer: memoryview) -> None:
        self._interleaving = interleaving
        self._words = map_words(buffer)
        self._base = self._words.address(0)

    def load(self, index: int) -> int:
        if self._interleaving.is_inside():
            self._interleaving.point()
            for words, stored_index, value in reversed(self._interleaving.buffer()):
                if words is self._words and stored_index == index:
                    return value
        return self._words.load(index)

    def store(self, index: int, value: int) -> None:
        if not self._interleaving.is_inside():
            self._words.store(index, value)
            return
        self._interleaving.point()
        self._interleaving.buffer().append((self._words, index, value))

    @property
    def cells(self) -> Cells:
        return self

    __getitem__ = load
    __setitem__ = store

    def address(self, index: int) -> int:
        return self._words.address(index)

    def close(self) -> None:
        if self._interleaving.is_inside():
            self._interleaving.drain_own()
        self._words.close()


class InterleavedMembarrier:
    """A barrier for all threads of the run. is_effective: False for one that does nothing, to see what it is for"""

    is_available = True

    def __init__(self, interleaving: Interleaving, *, is_effective: bool = True) -> None:
        self._interleaving = interleaving
        self._is_effective = is_effective

    def issue(self) -> None:
        if self._is_effective:
            self._interleaving.point()
            self._interleaving.drain_all()


class InterleavedFutex:
    """A futex whose sleepers are threads of the run. `read`: returns the word at an address."""

    def __init__(self, interleaving: Interleaving, read: Callable[[int], int]) -> None:
        self._interleaving = interleaving
        self._read = read

    def wait(self, address: int, expected: int, timeout_s: float) -> bool:
        self._interleaving.point()
        self._interleaving.drain_own()
        if self._read(address) == expected:
            self._interleaving.sleep(address)
        return True

    def waker(self, address: int) -> Callable[[], int]:
        return lambda: self.wake(address)

    def wake(self, address: int) -> int:
        if not self._interleaving.is_inside():
            return 0
        self._interleaving.point()
        self._interleaving.drain_own()
        return self._interleaving.wake(address)
