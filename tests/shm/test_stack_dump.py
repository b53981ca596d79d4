"""Stacks of children, asked from outside."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from phalanx.shm.process import ChildProcess, ChildSpec, Spawner, wait_all_ready
from phalanx.shm.stack_dump import is_stopped, process_state
from support.children import wait_until


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner("test")
    spawner.start()
    yield spawner
    spawner.close()


@pytest.fixture
def child(spawner: Spawner) -> Iterator[ChildProcess]:
    child = spawner.spawn(ChildSpec(role="echo", target="support.children:echo", args=b"x"))
    wait_all_ready([child], time.monotonic() + 20.0)
    yield child
    child.stop(reason="end of test", timeout_s=0.0)


def test_a_child_shows_where_its_threads_stand_and_goes_on(child: ChildProcess) -> None:
    # It says that it is ready a moment before it waits.
    wait_until(lambda: "in wait" in child.stack(), timeout_s=10.0)

    assert "in serve_lifeline" in child.stack()
    assert child.exitcode is None


def test_a_child_in_a_call_into_a_library_shows_its_stack(spawner: Spawner) -> None:
    child = spawner.spawn(ChildSpec(role="busy", target="support.children:hold_the_interpreter", args=b"x"))
    wait_until(lambda: bool(child.receive()) and child.last_phase == "profile", timeout_s=20.0)

    assert "in hold_the_interpreter" in child.stack()
    child.stop(reason="end of test", timeout_s=0.0)


def test_a_child_is_asked_only_once_it_is_armed(spawner: Spawner) -> None:
    child = spawner.spawn(ChildSpec(role="echo", target="support.children:echo", args=b"x"))

    assert "not armed yet" in child.stack()
    wait_all_ready([child], time.monotonic() + 20.0)
    child.stop(reason="end of test", timeout_s=0.0)


def test_a_stopped_child_is_said_to_be_stopped_and_wakes_unharmed(child: ChildProcess) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(child.pid), timeout_s=10.0)
    assert "stopped by a signal" in child.stack()
    os.kill(child.pid, signal.SIGCONT)

    assert "in serve_lifeline" in child.stack()


def test_a_dead_child_has_no_stack(child: ChildProcess) -> None:
    child.kill()
    child.wait(10.0)

    assert child.stack() == "(the process does not answer)"
    assert process_state(child.pid) == ""
