"""The ring between real processes: any sizes, any speeds, any offset; and deaths in the middle of a wait."""

import hashlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from phalanx.shm.errors import QueueClosedError
from phalanx.shm.process import ChildProcess, ChildSpec, Note, Spawner, wait_all_ready
from phalanx.shm.ring_buffer import RingReader, RingWriter, create_ring, max_record_bytes
from phalanx.shm.segment import SharedSegment
from support.children import wait_until
from support.ring_peers import PeerArgs, stall


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner("test")
    spawner.start()
    yield spawner
    spawner.close()


def spawn_readers(
    spawner: Spawner, function: str, segment: SharedSegment, num_readers: int, seed: int = 0
) -> list[ChildProcess]:
    children = []
    for index in range(num_readers):
        args = PeerArgs(fd=segment.fd, size=segment.size, index=index, stall_seed=seed + index)
        spec = ChildSpec(
            role=f"test {function} {index}",
            target=f"support.ring_peers:{function}",
            args=msgspec.msgpack.encode(args),
            pass_fds=(segment.fd,),
        )
        children.append(spawner.spawn(spec))
    wait_all_ready(children, soon())
    return children


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def check_digests(children: list[ChildProcess], expected: bytes) -> None:
    for child in children:
        assert child.wait(30) == 0
        assert child.receive() == [Note(expected)]
        child.stop(reason="test", timeout_s=5)


@pytest.mark.parametrize(
    ("num_readers", "capacity"),
    [
        (3, 512),
        pytest.param(1, 256, marks=pytest.mark.full),
        pytest.param(2, 4096, marks=pytest.mark.full),
        pytest.param(8, 1 << 20, marks=pytest.mark.full),
        pytest.param(16, 1024, marks=pytest.mark.full),
    ],
)
def test_readers_of_any_speed_get_records_of_any_size(
    spawner: Spawner, num_readers: int, capacity: int
) -> None:
    seed = 7 * num_readers + capacity
    choices = random.Random(seed)
    segment = create_ring("test", capacity=capacity, num_readers=num_readers)
    children = spawn_readers(spawner, "digest_records_with_stalls", segment, num_readers, seed)
    digest = hashlib.sha256()
    with RingWriter(segment) as writer:
        for _ in range(3000):
            stall(choices)
            content = choices.randbytes(
                choices.choice((0, 1, 8, 100, choices.randrange(max_record_bytes(capacity))))
            )
            content = content[: max_record_bytes(capacity)]
            digest.update(content)
            writer.write(content, deadline_at=soon())
        writer.check_invariants()

    check_digests(children, digest.digest())


def test_a_record_wraps_at_every_offset_between_processes(spawner: Spawner) -> None:
    segment = create_ring("test", capacity=256, num_readers=2)
    children = spawn_readers(spawner, "digest_records", segment, 2)
    digest = hashlib.sha256()
    sizes = random.Random(0)
    begun_at: set[tuple[int, bool]] = set()
    with RingWriter(segment) as writer:
        for number in range(6000):
            content = bytes([number % 251]) * sizes.randrange(max_record_bytes(256) + 1)
            offset = writer.position % 256
            begun_at.add((offset, offset + 8 + len(content) > 256))
            digest.update(content)
            writer.write(content, deadline_at=soon())

    check_digests(children, digest.digest())
    # A record that fits at every offset, and one that does not wherever that can be.
    assert begun_at >= {(offset, False) for offset in range(0, 256, 8)}
    assert begun_at >= {(offset, True) for offset in range(136, 256, 8)}


def test_an_empty_ring_is_rewound_and_a_full_one_is_not() -> None:
    with create_ring("test", capacity=4 << 20, num_readers=1) as segment:
        writer = RingWriter(SharedSegment.attach(_duplicate(segment), segment.size))
        reader = RingReader(SharedSegment.attach(_duplicate(segment), segment.size), 0)
        offsets = set()
        for number in range(2000):
            writer.write(bytes([number % 251]) * 4096)
            with reader.read() as view:
                assert view[-1] == number % 251
            offsets.add(writer.position % writer.capacity)
            writer.check_invariants()
            reader.check_invariants()
        assert max(offsets) < 300 << 10

        # One record is always unread, so the ring is never empty, and goes all the way round.
        writer.write(bytes(4096))
        for _ in range(2000):
            writer.write(bytes(4096))
            with reader.read():
                pass
            offsets.add(writer.position % writer.capacity)
        assert max(offsets) > (4 << 20) - 8192
        writer.close()
        reader.close()


def _duplicate(segment: SharedSegment) -> int:
    return os.dup(segment.fd)


def test_a_writer_in_its_wait_notices_the_death_of_a_reader(spawner: Spawner) -> None:
    segment = create_ring("test", capacity=256, num_readers=2)
    (child,) = spawn_readers(spawner, "hold_one", segment, 1)
    with (
        RingReader(SharedSegment.attach(_duplicate(segment), segment.size), 1) as live,
        RingWriter(segment, is_peer_alive=lambda: child.exitcode is None) as writer,
    ):
        for _ in range(2):
            writer.write(bytes(100))
            with live.read():
                pass
        died_at = _kill_in_wait(child, lambda: writer.stats().num_waits > 0)
        with pytest.raises(QueueClosedError):
            writer.write(bytes(100), deadline_at=math.inf)

        assert time.monotonic() - died_at() < 1.0
    child.stop(reason="test", timeout_s=5)


def test_a_reader_in_its_wait_notices_the_death_of_the_writer(spawner: Spawner) -> None:
    segment = create_ring("test", capacity=256, num_readers=1)
    (child,) = spawn_readers(spawner, "write_one_and_stay", segment, 1)
    with RingReader(segment, 0, is_peer_alive=lambda: child.exitcode is None) as reader:
        with reader.read(deadline_at=soon()) as view:
            assert bytes(view) == b"first"
        num_waits = reader.stats().num_waits
        died_at = _kill_in_wait(child, lambda: reader.stats().num_waits > num_waits)
        with pytest.raises(QueueClosedError), reader.read(deadline_at=math.inf):
            pass

        assert time.monotonic() - died_at() < 1.0
    child.stop(reason="test", timeout_s=5)


def _kill_in_wait(child: ChildProcess, is_waiting: Callable[[], bool]) -> Callable[[], float]:
    """Kill `child` once somebody waits; return what tells when."""
    killed_at: list[float] = []

    def kill() -> None:
        wait_until(is_waiting, timeout_s=20, what="the wait")
        killed_at.append(time.monotonic())
        child.kill()

    thread = threading.Thread(target=kill)
    thread.start()

    def died_at() -> float:
        thread.join()
        return killed_at[0]

    return died_at
