"""Words and the futex."""

import ctypes.util
import platform
import threading
import time

import pytest

from phalanx.shm import ordering
from phalanx.shm.errors import TransportError
from phalanx.shm.ordering import AtomicWords, Futex, Membarrier, NativeWords, Words, map_words
from phalanx.shm.segment import SharedSegment

_HAS_LIBATOMIC = ctypes.util.find_library("atomic") is not None


@pytest.fixture(params=[NativeWords, AtomicWords])
def kind(request: pytest.FixtureRequest) -> type[NativeWords] | type[AtomicWords]:
    if request.param is AtomicWords and not _HAS_LIBATOMIC:
        pytest.skip("no libatomic on this machine")
    return request.param  # type: ignore[no-any-return]


def test_words_keep_what_was_stored(kind: type[NativeWords] | type[AtomicWords]) -> None:
    with SharedSegment.create("test", 64) as segment:
        words: Words = kind(segment.buffer)
        words.store(3, 2**64 - 1)
        words.store(4, 5)

        assert [words.load(index) for index in (2, 3, 4)] == [0, 2**64 - 1, 5]
        assert segment.buffer[32] == 5
        words.close()


def test_closed_words_refuse_access(kind: type[NativeWords] | type[AtomicWords]) -> None:
    with SharedSegment.create("test", 64) as segment:
        words: Words = kind(segment.buffer)
        words.close()
        words.close()

        with pytest.raises(ValueError, match=r"closed|released"):
            words.load(0)
        with pytest.raises(ValueError, match=r"closed|released"):
            words.store(0, 1)


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (4, 12)])
def test_unaligned_words_are_refused(start: int, stop: int) -> None:
    with SharedSegment.create("test", 64) as segment:
        view = segment.buffer[start:stop]
        with pytest.raises(ValueError, match="word"):
            map_words(view)
        view.release()


def test_an_unknown_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")

    with pytest.raises(TransportError, match="riscv64"):
        map_words(memoryview(bytearray(64)))
    with pytest.raises(TransportError, match="riscv64"):
        Futex()


def test_a_futex_wait_ends_with_its_time() -> None:
    with SharedSegment.create("test", 64) as segment:
        words = map_words(segment.buffer)
        began_at = time.monotonic()

        assert not Futex().wait(words.address(0), 0, 0.05)
        assert time.monotonic() - began_at >= 0.05
        words.close()


def test_a_futex_does_not_sleep_on_a_word_that_has_changed() -> None:
    with SharedSegment.create("test", 64) as segment:
        words = map_words(segment.buffer)
        words.store(0, 1)
        began_at = time.monotonic()

        assert Futex().wait(words.address(0), 0, 20)
        assert time.monotonic() - began_at < 10
        words.close()


def test_a_futex_wakes_a_sleeper() -> None:
    with SharedSegment.create("test", 64) as segment:
        words = map_words(segment.buffer)
        futex = Futex()
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(futex.wait(words.address(1), 0, 20)))
        thread.start()
        while futex.wake(words.address(1)) == 0:
            time.sleep(0)
        thread.join()

        assert results == [True]
        words.close()


def test_a_futex_on_memory_that_is_gone_is_an_error() -> None:
    with pytest.raises(TransportError, match="EFAULT"):
        Futex().wait(8, 0, 0.01)


def test_a_barrier_for_all_returns_where_the_kernel_has_one() -> None:
    barrier = Membarrier()

    assert barrier.is_available
    barrier.issue()


def test_a_kernel_without_a_barrier_for_all_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ordering._MEMBARRIER_SYSCALLS, platform.machine(), 100_000)
    barrier = Membarrier()

    assert not barrier.is_available
    with pytest.raises(TransportError, match="ENOSYS"):
        barrier.issue()
