"""Segments and the plan of them."""

import os
from pathlib import Path

import pytest

from phalanx.shm.errors import ConfigError, TransportError
from phalanx.shm.segment import PlannedSegment, SegmentPlan, SharedSegment, available_memory_bytes

MIB = 1 << 20


def test_two_mappings_show_the_same_memory() -> None:
    with SharedSegment.create("test", 4096) as ours:
        with SharedSegment.attach(os.dup(ours.fd), 4096) as theirs:
            theirs.buffer[7] = 42

            assert ours.buffer[7] == 42


def test_a_segment_lives_on_when_another_mapping_closes() -> None:
    with SharedSegment.create("test", 4096) as ours:
        SharedSegment.attach(os.dup(ours.fd), 4096).close()

        ours.buffer[0] = 1


def test_memory_is_reserved_when_the_segment_is_made() -> None:
    with SharedSegment.create("test", 10 * 4096) as segment:
        assert os.fstat(segment.fd).st_blocks * 512 >= 10 * 4096


def test_the_size_is_sealed() -> None:
    with SharedSegment.create("test", 4096) as segment, pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)


def test_closing_twice_is_closing_once() -> None:
    segment = SharedSegment.create("test", 4096)
    segment.close()
    segment.close()


def test_a_segment_of_another_size_is_refused() -> None:
    with SharedSegment.create("test", 4096) as segment, pytest.raises(TransportError, match="4096"):
        SharedSegment.attach(segment.fd, 8192)


def test_memory_that_is_not_there_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)

    with pytest.raises(TransportError, match="no memory for the shared segment 'steps' of 4096 bytes"):
        SharedSegment.create("steps", 4096)


def test_a_plan_that_does_not_fit_names_its_largest_segments() -> None:
    plan = SegmentPlan(
        segments=(
            PlannedSegment(name="board", num_bytes=4096),
            PlannedSegment(name="dp0 requests", num_bytes=32 * MIB),
        )
    )

    assert plan.total_bytes == 32 * MIB + 4096
    plan.check_fits(33 * MIB)
    with pytest.raises(ConfigError, match=r"dp0 requests 32\.0 MiB.*16\.0 MiB are free"):
        plan.check_fits(16 * MIB)


def fake_system(folder: Path, cgroup_line: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """Lay out /proc and /sys/fs/cgroup of a host with 1000 MiB free."""
    proc, cgroup = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable: 1024000 kB\n")
    (proc / "self/cgroup").write_text(cgroup_line)
    for name, value in limits.items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(value)
    return proc, cgroup


@pytest.mark.parametrize(
    ("cgroup_line", "limits", "expected_mib"),
    [
        ("0::/\n", {}, 1000),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": "5"}, 1000),
        (
            "0::/a/b\n",
            {
                "a/memory.max": str(100 * MIB),
                "a/memory.current": str(40 * MIB),
                "a/b/memory.max": str(90 * MIB),
                "a/b/memory.current": "0",
            },
            60,
        ),
        (
            "5:cpu,memory:/x\n",
            {
                "memory/x/memory.limit_in_bytes": str(7 * MIB),
                "memory/x/memory.usage_in_bytes": str(9 * MIB),
            },
            0,
        ),
    ],
)
def test_available_memory_is_what_host_and_cgroups_allow(
    tmp_path: Path, cgroup_line: str, limits: dict[str, str], expected_mib: int
) -> None:
    proc, cgroup = fake_system(tmp_path, cgroup_line, limits)

    assert available_memory_bytes(proc, cgroup) == expected_mib * MIB


def test_this_machine_has_memory() -> None:
    assert available_memory_bytes() > 0
