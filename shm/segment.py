"""Anonymous shared memory: one segment, and the plan of all segments of a cluster.

Called by: who creates a ring or a board (a parent), and the child that got the descriptor by inheritance.
Invariant: a segment has no name, so nothing can leak or collide; it is gone when the last descriptor and
mapping are, whoever was killed. Its memory is reserved when it is created and its size is sealed, so that no
later access can end in SIGBUS.

When the peer dies: nothing happens to the memory.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from .errors import ConfigError, TransportError

_F_ADD_SEALS = 1033
_F_SEAL_SEAL = 1
_F_SEAL_SHRINK = 2
_F_SEAL_GROW = 4


class SharedSegment:
    """Memory that a child can map too. Owner: who made it, by `create` or `attach`.

    fd:     the descriptor to hand to a child (`pass_fds`); closed on exec unless handed on
    size:   bytes
    buffer: all of it, writable, as bytes

    `close` is idempotent; buffers cut from `buffer` must be released before.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.buffer = memoryview(self._mapping)

    @classmethod
    def create(cls, name: str, size: int) -> Self:
        """Reserve `size` bytes of zeroed memory. `name` is a remark for /proc; two may be alike.

        Raises TransportError when the memory is not there.
        """
        fd = os.memfd_create(f"phalanx-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
            return cls(fd, size)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise TransportError(f"no memory for the shared segment {name!r} of {size} bytes") from None
            raise TransportError(f"cannot create the shared segment {name!r}: {error}") from error

    @classmethod
    def attach(cls, fd: int, size: int) -> Self:
        """Map a segment that was inherited as `fd`, and own that descriptor from now on.

        Raises TransportError when `fd` is not a segment of that size.
        """
        try:
            actual = os.fstat(fd).st_size
            if actual != size:
                raise TransportError(f"descriptor {fd} holds {actual} bytes, not a segment of {size}")
            return cls(fd, size)
        except OSError as error:
            raise TransportError(f"cannot map the shared segment of descriptor {fd}: {error}") from error

    def address(self) -> int:
        """Return where the mapping begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def close(self) -> None:
        """Unmap, and close the descriptor. Raises BufferError while a buffer cut from it is in use."""
        if self.fd < 0:
            return
        self.buffer.release()
        self._mapping.close()
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSegment:
    """One segment to come: what for, and how many bytes."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """All shared memory of a cluster, summed before anything starts."""

    segments: tuple[PlannedSegment, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments together."""
        return sum(segment.num_bytes for segment in self.segments)

    def check_fits(self, available_bytes: int) -> None:
        """Raise ConfigError when the segments need more than `available_bytes`, naming the largest."""
        if self.total_bytes <= available_bytes:
            return
        largest = sorted(self.segments, key=lambda segment: -segment.num_bytes)[:3]
        names = ", ".join(f"{segment.name} {_mebibytes(segment.num_bytes)}" for segment in largest)
        raise ConfigError(
            "executor.request_ring_bytes",
            f"shared memory of {_mebibytes(self.total_bytes)} is needed ({len(self.segments)} segments, the largest: "
            f"{names}), and {_mebibytes(available_bytes)} are free",
        )


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how much memory this process may still take: what the host has free, or its cgroups allow.

    Looks at every cgroup (v1 and v2) on the way from this process's own to the root.
    """
    limits = [_meminfo_available(proc)]
    for line in _read_text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_file, usage_file = cgroup, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_file, usage_file = cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            limit = _read_number(place / limit_file)
            usage = _read_number(place / usage_file)
            if limit is not None and usage is not None:
                limits.append(max(0, limit - usage))
            if place == root:
                break
    return min(limits)


def _meminfo_available(proc: Path) -> int:
    for line in _read_text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise TransportError(f"{proc}/meminfo does not say MemAvailable")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
