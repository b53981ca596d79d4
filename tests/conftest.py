"""Fixtures for all tests: nothing may be left behind, and a GPU test needs a GPU."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    # Triton reads it when it is imported, and torch may import it early.
    os.environ.setdefault("TRITON_INTERPRET", "1")

_SETTLE_S = 5.0
"""How long a test's threads, children and descriptors may take to go after the test has ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, without importing torch to find out."""
    if not Path("/dev/nvidiactl").exists():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the test that leaves a child process, a thread, a descriptor or a shared segment behind.

    Segments are anonymous, so a leaked one is a leaked descriptor ("/memfd:..."). What a fixture of a wider scope
    holds was there before the test, and is not counted.
    """
    before = _left_over()
    yield
    deadline = time.monotonic() + _SETTLE_S
    while leaked := _left_over() - before:
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + ", ".join(sorted(leaked)))
        time.sleep(0.01)


def _left_over() -> set[str]:
    return _children() | _threads() | _descriptors()


def _children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {f"child process {pid}" for pid in (task / "children").read_text().split()}
        except FileNotFoundError:  # the thread ended meanwhile
            continue
    return found


def _threads() -> set[str]:
    # Names of the form "pymp..." or torch's own pools are native threads, which Python does not list.
    return {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        found.add(f"descriptor {name} -> {target}")
    return found
