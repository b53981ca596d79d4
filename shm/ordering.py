"""Ordered 8-byte words in shared memory, the futex that waits for one to change, and the kernel's barrier for all.

Called by: the ring buffer and the status board, in every process and thread that shares a segment.
Invariant: every word has one writer, so loads and stores are enough; no read-modify-write is needed.

What orders what. A writer fills memory and then stores a word (`Words.store`, a release: nothing earlier comes after
it); a reader loads the word (`Words.load`, an acquire: nothing later comes before it) and then reads the memory. The
reader that sees the new word sees all that was written before it, and a word that is stored after the last look at
something (a reader's cursor) is not seen before that look is over.

* x86-64: stores become visible in their order, loads are performed in theirs, and a store never before an earlier load;
  so a plain aligned store is a release and a plain aligned load an acquire. CPython packs and unpacks an item of
  format "Q" by one 8-byte move, within one call through a function pointer, which no compiler moves across another.
* aarch64: plain accesses to different places may pass each other in every way, so `__atomic_load_8` (acquire) and
  `__atomic_store_8` (release) of libatomic are called through ctypes: the instructions ldar and stlr, or their like.
  The copying between them is done by plain instructions, which those two keep on their side. This path was run on
  x86-64, where it cannot fail, and never on Arm; what speaks for it is the model in tests/support/ring_model.py, which
  finds each acquire or release that is left out where the machine's rules do not imply it.
* anything else: `map_words` refuses.

A store followed by a load of *another* word is ordered on neither machine ("is anybody asleep?" asked after
publishing may be answered from before). There are two ways out, both by full barriers in system calls:

* Publish, and always wake. FUTEX_WAKE has one between the caller's stores and its look at the queue of sleepers,
  FUTEX_WAIT one between queueing the caller and its look at the word.
* Publish, look at a flag, and wake only when it is up. Who wants to sleep raises its flag and has the kernel give a
  barrier to everybody (`Membarrier`) before it looks for the last time. Whatever a publisher is just doing, the barrier
  falls somewhere into it: behind its store, which is then seen by that last look; or before it, and then the look at
  the flag, which comes after the store, sees it raised. So the side that runs often pays nothing.

An eventfd needs neither: its count is changed and read under one lock, so who has read it sees what was stored before.

When the peer dies: a word keeps its value, and a sleeper is not woken. Who sleeps does so in short slices
and looks at its peer in between.
"""

import ctypes
import errno
import platform
import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol

from .errors import TransportError

WORD_BYTES = 8
CACHE_LINE_BYTES = 64

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL_SLEEPERS = 2**31 - 1
_FUTEX_SYSCALLS = {"x86_64": 202, "aarch64": 98}
_MEMBARRIER_SYSCALLS = {"x86_64": 324, "aarch64": 283}
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2
_ACQUIRE = 2
_RELEASE = 3
_U32_MASK = 0xFFFF_FFFF


class Cells(Protocol):
    """Words as a sequence: `cells[i]` is a load and `cells[i] = v` a store, as `Words.load` and `Words.store`."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class Words(Protocol):
    """A row of unsigned 8-byte words, addressed by index. After `close` every access raises ValueError."""

    @property
    def cells(self) -> Cells:
        """The words for who accesses them often: half the cost of a call."""
        ...

    def load(self, index: int) -> int:
        """Read word `index`; what its writer wrote before it can be seen afterwards (acquire)."""
        ...

    def store(self, index: int, value: int) -> None:
        """Write word `index`, in [0, 2**64); all that was written before is seen by who sees it (release)."""
        ...

    def address(self, index: int) -> int:
        """Return the address of word `index`, for the futex. Valid until `close`."""
        ...

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        ...


class NativeWords:
    """Words by plain 8-byte moves: right where the machine orders loads and stores by itself (x86-64)."""

    def __init__(self, buffer: memoryview) -> None:
        self._address = _address_of(buffer)
        self._words = buffer.cast("Q")
        self.cells: Cells = self._words
        # The view's own methods: a method around each would cost as much again as the access.
        self.load: Callable[[int], int] = self._words.__getitem__
        self.store: Callable[[int, int], None] = self._words.__setitem__

    def address(self, index: int) -> int:
        return self._address + index * WORD_BYTES

    def close(self) -> None:
        self._words.release()


class AtomicWords:
    """Words by libatomic's acquire loads and release stores: right on every machine that has it."""

    def __init__(self, buffer: memoryview) -> None:
        self._address = _address_of(buffer)
        self._buffer = buffer.cast("B")
        self._num_words = buffer.nbytes // WORD_BYTES
        try:
            libatomic = ctypes.CDLL("libatomic.so.1")
            self._load = libatomic.__getattr__("__atomic_load_8")
            self._store = libatomic.__getattr__("__atomic_store_8")
        except (OSError, AttributeError) as error:
            raise TransportError(f"libatomic.so.1 is needed on this machine: {error}") from None
        self._load.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._load.restype = ctypes.c_uint64
        self._store.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
        self._store.restype = None

    def load(self, index: int) -> int:
        value: int = self._load(self.address(index), _ACQUIRE)
        return value

    def store(self, index: int, value: int) -> None:
        self._store(self.address(index), value, _RELEASE)

    __getitem__ = load
    __setitem__ = store

    @property
    def cells(self) -> Cells:
        return self

    def address(self, index: int) -> int:
        if not 0 <= index < self._num_words:
            raise IndexError(index)
        if self._num_words and len(self._buffer) == 0:
            raise ValueError("the words are closed")
        return self._address + index * WORD_BYTES

    def close(self) -> None:
        self._buffer.release()


def map_words(buffer: memoryview) -> Words:
    """See `buffer` (writable, 8-byte aligned, a multiple of 8 bytes) as words, as this machine needs it.

    Raises TransportError on a machine whose ordering is not known here.
    """
    machine = platform.machine()
    if sys.byteorder != "little" or machine not in _FUTEX_SYSCALLS:
        raise TransportError(f"shared memory needs x86-64 or aarch64 (little-endian), and this is {machine}")
    return NativeWords(buffer) if machine == "x86_64" else AtomicWords(buffer)


class Futex:
    """The kernel's "sleep while this word is unchanged". Works across processes on shared memory.

    The kernel looks at 4 bytes: the low half of a word. A word that is used so must not come back to the
    same low half while somebody may be about to sleep. No state; any thread may call any method.
    """

    def __init__(self) -> None:
        machine = platform.machine()
        if machine not in _FUTEX_SYSCALLS:
            raise TransportError(f"futex: the system call's number on {machine} is not known here")
        self._number = ctypes.c_long(_FUTEX_SYSCALLS[machine])
        self._sleeping_call = ctypes.CDLL(None, use_errno=True).syscall
        self._sleeping_call.restype = ctypes.c_long
        # Keeps the interpreter's lock: a wake does not block, and handing the lock over costs more than the call.
        self._short_call = ctypes.PyDLL(None, use_errno=True).syscall
        self._short_call.restype = ctypes.c_int

    def wait(self, address: int, expected: int, timeout_s: float) -> bool:
        """Sleep until the word at `address` is woken, or no longer holds `expected` (its low half).

        Returns False when `timeout_s` passed, True otherwise; also True for no reason (a signal, a wake-up
        that was meant for an older sleeper), so the caller looks again. Releases the interpreter's lock.
        """
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1.0 * 1e9))
        # Not the private variant: the sleepers are in other processes.
        result = self._sleeping_call(
            self._number,
            ctypes.c_void_p(address),
            _FUTEX_WAIT,
            ctypes.c_uint32(expected & _U32_MASK),
            ctypes.byref(timeout),
        )
        if result == 0:
            return True
        problem = ctypes.get_errno()
        if problem == errno.ETIMEDOUT:
            return False
        if problem in (errno.EAGAIN, errno.EINTR):
            return True
        raise TransportError(f"futex wait failed: {errno.errorcode.get(problem, problem)}")

    def waker(self, address: int) -> Callable[[], int]:
        """Return a prepared `wake` of one address, for who wakes often: half the cost.

        It returns -1 for an error, which only an address that is not mapped can cause.
        """
        return partial(self._short_call, self._number, ctypes.c_void_p(address), _FUTEX_WAKE, _ALL_SLEEPERS)

    def wake(self, address: int) -> int:
        """Wake all who sleep on the word at `address`. Returns how many there were."""
        result = self.waker(address)()
        if result < 0:
            problem = ctypes.get_errno()
            raise TransportError(f"futex wake failed: {errno.errorcode.get(problem, problem)}")
        return result


class Membarrier:
    """The kernel's full barrier for all running threads of all processes that have ever made one of these.

    A thread that does not run has passed one when it was stopped. No state; any thread may call any method.
    is_available: False where the kernel has none (before Linux 4.16), or a filter of system calls forbids it
    """

    def __init__(self) -> None:
        # As a wake: short, and not worth handing the interpreter's lock over.
        self._call = ctypes.PyDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._number = ctypes.c_long(_MEMBARRIER_SYSCALLS[platform.machine()])
        # Barriers of others reach this process from here on, as long as it lives.
        self.is_available = self._call(self._number, _REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0

    def issue(self) -> None:
        """Return when all have passed a barrier, this thread too: some microseconds. Raises TransportError."""
        if self._call(self._number, _GLOBAL_EXPEDITED, 0, 0) != 0:
            problem = ctypes.get_errno()
            raise TransportError(f"membarrier failed: {errno.errorcode.get(problem, problem)}")


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _address_of(buffer: memoryview) -> int:
    """Return where `buffer` begins, after checking that it is made of whole, aligned words."""
    if buffer.nbytes % WORD_BYTES:
        raise ValueError(f"{buffer.nbytes} bytes are not a whole number of {WORD_BYTES}-byte words")
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    if address % WORD_BYTES:
        raise ValueError("the words are not aligned; an unaligned access is not atomic")
    return address
