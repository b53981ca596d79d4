"""ChildProcess and the child's half of it, with real processes."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.shm import lifeline, process
from phalanx.shm.errors import ConfigError, ProcessDiedError, QueueClosedError, StartupError
from phalanx.shm.exit_codes import ExitCode
from phalanx.shm.process import ChildMessage, ChildProcess, ChildSpec, Note, Spawner, wait_all_ready
from support.children import is_gone, wait_until


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner("test")
    spawner.start()
    yield spawner
    spawner.close()


def spawn(spawner: Spawner, function: str, *, args: bytes = b"args", rank: int | None = None) -> ChildProcess:
    return spawner.spawn(
        ChildSpec(role=f"test {function}", target=f"support.children:{function}", args=args, rank=rank)
    )


def soon() -> float:
    return time.monotonic() + 20


def receive_until(child: ChildProcess, kind: type[ChildMessage]) -> ChildMessage:
    while True:
        assert select.select([child.lifeline_fd], [], [], 20)[0]
        for message in child.receive():
            if isinstance(message, kind):
                return message


def test_child_gets_its_arguments_and_answers_messages(spawner: Spawner) -> None:
    child = spawn(spawner, "echo", args=b"hello")

    assert wait_all_ready([child], soon()) == [b"hello"]
    child.send(b"ping")
    assert receive_until(child, Note) == Note(b"ping")
    assert child.stop(reason="test", timeout_s=5) == 7


def test_messages_may_be_of_any_length(spawner: Spawner) -> None:
    """Also above what the kernel takes in one packet, or holds in a socket."""
    child = spawn(spawner, "double_messages", args=b"x" * 300_000)
    wait_all_ready([child], soon())

    for length in (0, lifeline.PIECE_BYTES - 1, lifeline.PIECE_BYTES, lifeline.PIECE_BYTES + 1, 600_000):
        child.send(b"y" * length)
        assert receive_until(child, Note) == Note(b"y" * 2 * length)
    assert child.stop(reason="test", timeout_s=5) == 0


def test_an_error_may_be_long_and_in_any_script(spawner: Spawner) -> None:
    child = spawn(spawner, "raise_a_long_error")

    with pytest.raises(StartupError, match="\N{SNOWMAN}"):
        wait_all_ready([child], soon())
    assert child.failure is not None
    assert "\N{SNOWMAN}" in child.failure.traceback
    child.stop(reason="test", timeout_s=5)


def test_a_child_that_reads_nothing_does_not_hold_up_its_parent(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_SEND_TIMEOUT_S", 0.2)
    child = spawn(spawner, "echo")
    wait_all_ready([child], soon())
    os.kill(child.pid, signal.SIGSTOP)

    def tell_much() -> None:
        for _ in range(1000):
            child.send(b"x" * 3000)

    with pytest.raises(QueueClosedError, match="does not read"):
        tell_much()
    assert child.wait(10) == -signal.SIGKILL
    assert "does not read" in str(child.death(ProcessDiedError))
    child.stop(reason="test", timeout_s=5)


def test_a_child_that_cannot_take_a_message_ends_and_says_so(spawner: Spawner) -> None:
    child = spawn(spawner, "choke_on_messages")
    wait_all_ready([child], soon())

    child.send(b"word")

    assert child.wait(10) == ExitCode.FAILED
    child.receive()
    assert "what is that?" in str(child.death(ProcessDiedError))
    child.stop(reason="test", timeout_s=5)


def test_garbage_collection_goes_on_but_not_through_what_was_imported(spawner: Spawner) -> None:
    child = spawn(spawner, "tell_of_garbage_collection")

    assert wait_all_ready([child], soon()) == [b"True True"]
    assert child.stop(reason="test", timeout_s=5) == 0


def test_children_start_side_by_side_and_answer_in_order(spawner: Spawner) -> None:
    children = [spawn(spawner, "echo", args=b"%d" % i) for i in range(3)]

    assert wait_all_ready(children, soon()) == [b"0", b"1", b"2"]
    for child in children:
        child.stop(reason="test", timeout_s=5)


def test_an_exception_before_ready_names_role_and_error(spawner: Spawner) -> None:
    child = spawn(spawner, "raise_before_ready", rank=3)

    with pytest.raises(StartupError, match="no such tensor") as caught:
        wait_all_ready([child], soon())
    assert caught.value.role == "test raise_before_ready"
    assert caught.value.rank == 3
    assert child.failure is not None
    assert "raise RuntimeError" in child.failure.traceback
    assert child.stop(reason="test", timeout_s=5) == ExitCode.BOOT_FAILED


def test_a_config_error_keeps_its_field(spawner: Spawner) -> None:
    child = spawn(spawner, "raise_config_error")

    with pytest.raises(ConfigError, match=r"^model\.path: is a joke$"):
        wait_all_ready([child], soon())
    child.stop(reason="test", timeout_s=5)


def test_an_exit_before_ready_tells_status_and_phase(spawner: Spawner) -> None:
    child = spawn(spawner, "exit_before_ready")

    with pytest.raises(StartupError, match="last phase: device") as caught:
        wait_all_ready([child], soon())
    assert caught.value.exitcode == 9
    child.stop(reason="test", timeout_s=5)


def test_the_deadline_names_all_that_are_missing(spawner: Spawner) -> None:
    ready, missing = spawn(spawner, "echo"), spawn(spawner, "never_ready")
    wait_all_ready([ready], soon())
    wait_until(lambda: bool(missing.receive()) and missing.last_phase == "profile", timeout_s=20)

    with pytest.raises(StartupError, match=r"test never_ready \(in profile\) did not start: not ready"):
        wait_all_ready([ready, missing], time.monotonic() + 0.05)
    assert missing.stop(reason="test", timeout_s=5) == -signal.SIGTERM
    ready.stop(reason="test", timeout_s=5)


def test_a_deaf_child_is_killed_within_the_bound(spawner: Spawner) -> None:
    child = spawn(spawner, "ignore_stop")
    seen: list[ChildMessage] = []
    wait_all_ready([child], soon(), on_message=lambda _, message: seen.append(message))
    if Note(b"deaf") not in seen:
        receive_until(child, Note)

    assert child.stop(reason="test", timeout_s=0.1) == -signal.SIGKILL


def test_a_stopped_child_is_killed_within_the_bound(spawner: Spawner) -> None:
    child = spawn(spawner, "echo")
    wait_all_ready([child], soon())
    os.kill(child.pid, signal.SIGSTOP)

    assert child.stop(reason="test", timeout_s=0.1) == -signal.SIGKILL


def test_a_killed_child_is_seen_by_its_pidfd_and_described(spawner: Spawner) -> None:
    child = spawn(spawner, "echo", rank=1)
    wait_all_ready([child], soon())

    os.kill(child.pid, signal.SIGKILL)
    assert select.select([child.pidfd], [], [], 10)[0]

    child.receive()
    assert "was killed by signal 9" in str(child.death(ProcessDiedError))
    with pytest.raises(QueueClosedError):
        child.send(b"anyone?")
    assert child.stop(reason="test", timeout_s=5) == -signal.SIGKILL


def test_a_child_started_from_a_short_lived_thread_lives_on(spawner: Spawner) -> None:
    children: list[ChildProcess] = []
    thread = threading.Thread(target=lambda: children.append(spawn(spawner, "echo")))
    thread.start()
    thread.join()

    wait_all_ready(children, soon())
    children[0].send(b"alive")
    assert receive_until(children[0], Note) == Note(b"alive")
    assert children[0].stop(reason="test", timeout_s=5) == 7


def test_a_stop_may_come_at_any_moment_of_the_wait_for_it(spawner: Spawner) -> None:
    child = spawn(spawner, "stop_within_the_wait")

    assert wait_all_ready([child], soon()) == [b""]
    assert child.wait(10) == 7
    child.stop(reason="test", timeout_s=0)


def test_stop_is_idempotent(spawner: Spawner) -> None:
    child = spawn(spawner, "echo")
    wait_all_ready([child], soon())

    assert [child.stop(reason="test", timeout_s=5) for _ in range(3)] == [7, 7, 7]


@pytest.mark.parametrize("target", ["echo", "never_ready"])
def test_nothing_survives_the_parent(target: str) -> None:
    script = f"""
        import time
        from phalanx.shm.process import ChildSpec, Spawner
        spawner = Spawner("test")
        spawner.start()
        child = spawner.spawn(ChildSpec(role="orphan", target="support.children:{target}", args=b"x"))
        print(child.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())

    parent.kill()
    parent.wait()
    parent.stdout.close()

    wait_until(lambda: is_gone(orphan), timeout_s=5, what="the end of the orphan")
