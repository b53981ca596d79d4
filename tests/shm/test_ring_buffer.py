"""The ring: every record, in order, to every reader, once; and no wait that outlives its peer."""

import contextlib
import ctypes.util
import hashlib
import itertools
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.shm import ordering, ring_end, ring_writer
from phalanx.shm.errors import (
    MessageTooLargeError,
    ProtocolError,
    QueueClosedError,
    QueueEmptyError,
    QueueTimeoutError,
    RingFullError,
    TransportError,
)
from phalanx.shm.ordering import AtomicWords, NativeWords, Words
from phalanx.shm.process import ChildProcess, ChildSpec, Note, Spawner, wait_all_ready
from phalanx.shm.ring_buffer import RingReader, RingWriter, create_ring, max_record_bytes
from phalanx.shm.segment import SharedSegment
from support.ring_peers import PeerArgs, record


@contextmanager
def ring_of(capacity: int, num_readers: int = 1) -> Iterator[tuple[RingWriter, list[RingReader]]]:
    """A ring with all its ends in this process, each with a mapping of its own."""
    segment = create_ring("test", capacity=capacity, num_readers=num_readers)
    readers = [
        RingReader(SharedSegment.attach(os.dup(segment.fd), segment.size), index)
        for index in range(num_readers)
    ]
    writer = RingWriter(segment)
    try:
        yield writer, readers
    finally:
        writer.close()
        for reader in readers:
            reader.close()


def read(reader: RingReader, deadline_at: float | None = None) -> bytes:
    with reader.read(deadline_at=deadline_at) as view:
        return bytes(view)


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


# One end after the other ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    num_readers=st.integers(1, 4),
    actions=st.lists(st.tuples(st.integers(-4, 3), st.integers(0, 300)), max_size=120),
    rewind_bytes=st.sampled_from([8, 64, 200, 1024]),
)
def test_every_reader_gets_every_record_in_order(
    num_readers: int, actions: list[tuple[int, int]], rewind_bytes: int
) -> None:
    with (
        mock.patch.object(ring_writer, "_REWIND_BYTES", rewind_bytes),
        ring_of(512, num_readers) as (writer, readers),
    ):
        written: list[bytes] = []
        num_read = [0] * num_readers
        for who, size in actions:
            if who < 0:
                content = bytes([len(written) % 256]) * size
                try:
                    if write_in_a_way(writer, content, way=-who):
                        written.append(content)
                    assert size <= max_record_bytes(512)
                except MessageTooLargeError:
                    assert size > max_record_bytes(512)
                except RingFullError:
                    assert min(num_read) < len(written)
            elif who < num_readers:
                try:
                    assert read(readers[who]) == written[num_read[who]]
                    num_read[who] += 1
                except QueueEmptyError:
                    assert num_read[who] == len(written)
            writer.check_invariants()
            for reader in readers:
                reader.check_invariants()


def write_in_a_way(writer: RingWriter, content: bytes, *, way: int) -> bool:
    """Write `content` in one of four ways; False for the one that begins a record and gives it up."""
    match way:
        case 1:
            writer.write(content)
        case 2:
            writer.write_bytes(content)
        case 3:
            with writer.reserve(len(content)) as view:
                view[:] = content
        case _:
            with contextlib.suppress(InterruptedError), writer.reserve(len(content)) as view:
                view[:] = content
                raise InterruptedError
            return False
    return True


@pytest.mark.parametrize("write", [RingWriter.write, RingWriter.write_bytes])
def test_a_record_of_any_size_fits_an_empty_ring_at_every_offset(
    write: Callable[[RingWriter, bytes], None],
) -> None:
    with ring_of(256) as (writer, (reader,)):
        for offset, size in itertools.product(range(0, 256, 8), (0, 1, 7, 8, 9, 64, max_record_bytes(256))):
            while writer.stats().capacity and _offset(writer) != offset:
                writer.write(b"")
                assert read(reader) == b""
            content = bytes(range(256))[:size]
            write(writer, content)
            assert read(reader) == content
            writer.check_invariants()


def _offset(writer: RingWriter) -> int:
    return writer._cursor % writer.capacity


def test_pieces_are_gathered_into_one_record() -> None:
    with ring_of(256) as (writer, (reader,)):
        writer.write(b"ab", memoryview(b"cd"), b"", b"e")

        assert read(reader) == b"abcde"


def test_a_reserved_record_is_published_when_its_block_ends() -> None:
    with ring_of(256) as (writer, (reader,)):
        with writer.reserve(4) as view:
            view[:] = b"1234"
            with pytest.raises(QueueEmptyError):
                read(reader)

        assert read(reader) == b"1234"


def test_a_reserved_record_is_not_published_when_its_block_raises() -> None:
    with ring_of(256) as (writer, (reader,)):
        with pytest.raises(TypeError), writer.reserve(4) as view:
            view[0] = "not a byte"  # type: ignore[call-overload]
        writer.write(b"next")

        assert read(reader) == b"next"


def test_a_full_ring_names_the_reader_that_is_behind() -> None:
    with ring_of(256, 2) as (writer, readers):
        writer.write(bytes(100))
        writer.write(bytes(100))
        read(readers[0])

        with pytest.raises(RingFullError, match="reader 1"):
            writer.write(bytes(100))
        with pytest.raises(QueueTimeoutError, match="reader 1"):
            writer.write(bytes(100), deadline_at=time.monotonic() + 0.02)
        assert writer.slowest_reader() == 1
        read(readers[1])
        writer.write(bytes(100))


def test_a_record_above_half_the_ring_is_refused() -> None:
    with ring_of(256) as (writer, _):
        with pytest.raises(MessageTooLargeError) as caught:
            writer.write(bytes(121))

        assert (caught.value.num_bytes, caught.value.max_bytes) == (121, 120)


def test_an_exception_while_reading_still_releases_the_record() -> None:
    with ring_of(256) as (writer, (reader,)):
        writer.write(b"one")
        writer.write(b"two")
        with pytest.raises(ZeroDivisionError), reader.read():
            raise ZeroDivisionError

        assert read(reader) == b"two"
        assert reader.stats().used_bytes == 0


def test_a_view_is_read_only_and_ends_with_its_read() -> None:
    with ring_of(256) as (writer, (reader,)):
        writer.write(b"one")
        with reader.read() as view:
            with pytest.raises(TypeError):
                view[0] = 1

        with pytest.raises(ValueError, match="released"):
            bytes(view)


def test_a_record_that_was_put_back_comes_again() -> None:
    with ring_of(256) as (writer, (reader,)):
        writer.write(b"one")
        writer.write(b"two")
        assert bytes(reader.acquire()) == b"one"
        reader.put_back()
        reader.put_back()

        assert reader.stats().num_records == 0
        assert [read(reader), read(reader)] == [b"one", b"two"]


def test_a_writer_waits_until_all_is_read() -> None:
    with ring_of(256, 2) as (writer, readers):
        writer.write(b"one")
        position = writer.position
        writer.write(b"two")
        read(readers[0])
        with pytest.raises(RingFullError, match="reader 1"):
            writer.wait_read(position)
        with pytest.raises(QueueTimeoutError, match="reader 1"):
            writer.wait_read(position, deadline_at=time.monotonic() + 0.02)
        read(readers[1])

        writer.wait_read(position)
        assert writer.read_position() == position < writer.position


def test_an_empty_ring_times_out() -> None:
    with ring_of(256) as (_, (reader,)):
        began_at = time.monotonic()
        with pytest.raises(QueueTimeoutError):
            read(reader, began_at + 0.05)

        assert time.monotonic() - began_at >= 0.05


def test_what_was_written_before_the_closing_is_still_read() -> None:
    with ring_of(256) as (writer, (reader,)):
        writer.write(b"last")
        writer.close()

        assert read(reader) == b"last"
        with pytest.raises(QueueClosedError):
            read(reader)
        with pytest.raises(QueueClosedError):
            read(reader, math.inf)
        with pytest.raises(QueueClosedError):
            writer.write(b"")


def test_a_writer_that_needs_room_sees_a_reader_that_closed() -> None:
    with ring_of(256) as (writer, (reader,)):
        reader.close()
        writer.write(bytes(100))
        writer.write(bytes(100))

        with pytest.raises(QueueClosedError):
            writer.write(bytes(100), deadline_at=math.inf)


def test_a_doorbell_rings_for_each_record() -> None:
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    segment = create_ring("test", capacity=256, num_readers=1)
    reader = RingReader(SharedSegment.attach(os.dup(segment.fd), segment.size), 0)
    with RingWriter(segment, doorbell_fd=bell) as writer, reader:
        writer.write(b"")
        writer.write(b"")

        assert os.eventfd_read(bell) == 2
    os.close(bell)


def test_an_end_that_may_not_do_what_the_ring_was_made_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with create_ring("test", capacity=256, num_readers=1) as segment:
        monkeypatch.setitem(ordering._MEMBARRIER_SYSCALLS, platform.machine(), 100_000)
        with pytest.raises(TransportError, match="membarrier"):
            RingWriter(segment)


def test_a_segment_without_a_ring_is_refused() -> None:
    with SharedSegment.create("test", 4096) as segment:
        with pytest.raises(ProtocolError):
            RingReader(segment, 0)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_reader_that_the_ring_does_not_have_is_refused(index: int) -> None:
    with create_ring("test", capacity=256, num_readers=2) as segment, pytest.raises(ValueError, match="of 2"):
        RingReader(segment, index)


def test_stats_tell_records_bytes_and_fill() -> None:
    with ring_of(256, 2) as (writer, readers):
        writer.write(b"12345")
        read(readers[0])

        stats = writer.stats()
        assert (stats.num_records, stats.num_bytes, stats.used_bytes) == (1, 5, 16)
        assert readers[0].stats().used_bytes == 0
        assert readers[1].stats().used_bytes == 16


# Threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize("has_barrier", [True, False])
@pytest.mark.parametrize("words", [NativeWords, AtomicWords])
def test_threads_lose_and_reorder_nothing(
    num_readers: int, words: type[Words], has_barrier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AtomicWords: the code of aarch64, on whatever machine this is. has_barrier: whether the kernel has one for all"""
    if words is AtomicWords and ctypes.util.find_library("atomic") is None:
        pytest.skip("no libatomic on this machine")
    monkeypatch.setattr(ring_end, "map_words", words)
    if not has_barrier:
        monkeypatch.setitem(ordering._MEMBARRIER_SYSCALLS, platform.machine(), 100_000)
    num_records = 2000
    expected = hashlib.sha256(b"".join(record(number) for number in range(num_records))).digest()
    with ring_of(512, num_readers) as (writer, readers):
        digests = [b""] * num_readers

        def digest_all(index: int) -> None:
            digest = hashlib.sha256()
            for _ in range(num_records):
                with readers[index].read(deadline_at=soon()) as view:
                    digest.update(view)
            digests[index] = digest.digest()

        threads = [threading.Thread(target=digest_all, args=(index,)) for index in range(num_readers)]
        for thread in threads:
            thread.start()
        for number in range(num_records):
            writer.write(record(number), deadline_at=soon())
        for thread in threads:
            thread.join()

        assert digests == [expected] * num_readers
        writer.check_invariants()


@pytest.mark.parametrize("who", ["reader waits", "writer waits"])
def test_closing_wakes_who_waits(who: str) -> None:
    with ring_of(256) as (writer, (reader,)):
        errors: list[type[BaseException]] = []

        def wait() -> None:
            try:
                if who == "reader waits":
                    read(reader, math.inf)
                else:
                    for _ in range(3):
                        writer.write(bytes(100), deadline_at=math.inf)
            except QueueClosedError as error:
                errors.append(type(error))

        thread = threading.Thread(target=wait)
        thread.start()
        end = reader if who == "reader waits" else writer
        while end.stats().num_waits == 0:
            time.sleep(0)
        (writer if who == "reader waits" else reader).close()
        thread.join(20)

        assert errors == [QueueClosedError]


# Processes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner("test")
    spawner.start()
    yield spawner
    spawner.close()


def spawn_peer(
    spawner: Spawner, function: str, segment: SharedSegment, *, index: int = 0, num_records: int = 0
) -> ChildProcess:
    args = PeerArgs(fd=segment.fd, size=segment.size, index=index, num_records=num_records)
    return spawner.spawn(
        ChildSpec(
            role=f"test {function} {index}",
            target=f"support.ring_peers:{function}",
            args=msgspec.msgpack.encode(args),
            pass_fds=(segment.fd,),
        )
    )


def test_processes_read_what_this_one_writes(spawner: Spawner) -> None:
    num_records = 5000
    segment = create_ring("test", capacity=1024, num_readers=3)
    children = [spawn_peer(spawner, "digest_records", segment, index=index) for index in range(3)]
    wait_all_ready(children, soon())
    with RingWriter(segment) as writer:
        for number in range(num_records):
            writer.write(record(number), deadline_at=soon())

    expected = hashlib.sha256(b"".join(record(number) for number in range(num_records))).digest()
    for child in children:
        assert child.wait(20) == 0
        assert child.receive() == [Note(expected)]
        child.stop(reason="test", timeout_s=5)


def test_a_process_writes_what_this_one_reads(spawner: Spawner) -> None:
    segment = create_ring("test", capacity=1024, num_readers=1)
    child = spawn_peer(spawner, "write_records", segment, num_records=5000)
    wait_all_ready([child], soon())
    with RingReader(segment, 0) as reader:
        for number in range(5000):
            assert read(reader, soon()) == record(number)
        with pytest.raises(QueueClosedError):
            read(reader, soon())
    child.stop(reason="test", timeout_s=5)


def test_a_writer_notices_a_reader_that_was_killed(spawner: Spawner) -> None:
    segment = create_ring("test", capacity=256, num_readers=1)
    child = spawn_peer(spawner, "read_one_and_die", segment)
    wait_all_ready([child], soon())
    with RingWriter(segment, is_peer_alive=lambda: child.exitcode is None) as writer:
        writer.write(bytes(100))
        writer.write(bytes(100))
        child.wait(20)
        began_at = time.monotonic()
        with pytest.raises(QueueClosedError):
            writer.write(bytes(100), deadline_at=math.inf)

        assert time.monotonic() - began_at < 1.0
    child.stop(reason="test", timeout_s=5)


def test_a_reader_gets_the_last_words_of_a_writer_that_was_killed(spawner: Spawner) -> None:
    segment = create_ring("test", capacity=256, num_readers=1)
    child = spawn_peer(spawner, "write_one_and_die", segment)
    wait_all_ready([child], soon())
    with RingReader(segment, 0, is_peer_alive=lambda: child.exitcode is None) as reader:
        assert read(reader, soon()) == b"last words"
        began_at = time.monotonic()
        with pytest.raises(QueueClosedError):
            read(reader, math.inf)

        assert time.monotonic() - began_at < 1.0
    child.stop(reason="test", timeout_s=5)


def test_a_waiting_process_uses_next_to_no_processor_time(spawner: Spawner) -> None:
    segment = create_ring("test", capacity=256, num_readers=1)
    child = spawn_peer(spawner, "wait_idle", segment)
    wait_all_ready([child], soon())

    with RingWriter(segment):
        used_before = _processor_s(child.pid)
        window_s = 1.5
        assert child.wait(window_s) is None
        used_s = _processor_s(child.pid) - used_before
    assert child.wait(20) == 0
    child.stop(reason="test", timeout_s=5)
    # One tick of the kernel's clock is 10 ms; the start's last tick may fall into the window.
    assert used_s / window_s < 0.02


def _processor_s(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) / 1e9
