"""The folder of sockets."""

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from phalanx.shm.errors import ConfigError
from phalanx.shm.runtime_dir import RuntimeDir
from support.children import wait_until


def test_the_folder_is_private_and_gone_after_close(tmp_path: Path) -> None:
    runtime_dir = RuntimeDir.create(tmp_path)

    assert stat.S_IMODE(runtime_dir.path.stat().st_mode) == 0o700
    assert runtime_dir.address("a") == f"ipc://{runtime_dir.path}/a"
    runtime_dir.close()
    runtime_dir.close()
    assert list(tmp_path.iterdir()) == []


def test_a_place_too_deep_for_sockets_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 107)
    deep.mkdir()

    with pytest.raises(ConfigError, match="TMPDIR"):
        RuntimeDir.create(deep)
    assert list(deep.iterdir()) == []


def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    first, second = RuntimeDir.create(tmp_path), RuntimeDir.create(tmp_path)

    assert first.path.is_dir()
    first.close()
    assert second.path.is_dir()
    second.close()


def test_the_janitor_removes_what_a_killed_owner_left(tmp_path: Path) -> None:
    script = f"""
        import os, pathlib, signal
        from phalanx.shm.runtime_dir import RuntimeDir
        runtime_dir = RuntimeDir.create(pathlib.Path({str(tmp_path)!r}))
        (runtime_dir.path / "socket").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, check=False)

    wait_until(lambda: not list(tmp_path.iterdir()), timeout_s=5, what="the janitor's work")


def test_the_next_owner_removes_what_is_left_when_the_janitor_was_killed_too(tmp_path: Path) -> None:
    script = f"""
        import os, pathlib, signal
        from phalanx.shm.runtime_dir import RuntimeDir
        runtime_dir = RuntimeDir.create(pathlib.Path({str(tmp_path)!r}))
        runtime_dir._janitor.kill()
        runtime_dir._janitor.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, check=False)
    (abandoned,) = tmp_path.iterdir()

    runtime_dir = RuntimeDir.create(tmp_path)
    assert not abandoned.exists()
    runtime_dir.close()


def test_a_stranger_s_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "phalanx-other").mkdir()

    RuntimeDir.create(tmp_path).close()
    assert (tmp_path / "phalanx-other").is_dir()
