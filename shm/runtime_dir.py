"""RuntimeDir: the private folder (0700) of a tree of processes, for the unix sockets that need a name.

Called by: the supervisor, and `AsyncLLM` when it starts an engine core of its own. The owner removes it at its end.
When the owner is killed, the *janitor* does: a shell that waits for the end of a pipe of which only the owner
holds the other side. And should both be killed in the same moment, the next owner to start does it: a lock on a
file in the folder, which the kernel drops with its holder, tells a folder in use from one that was left behind.
"""

import fcntl
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

from .errors import ConfigError
from .sockets import MAX_IPC_PATH_BYTES

_PREFIX = "phalanx-"
_TOKEN_BYTES = 6
_FOLDER_BYTES = len(f"/{_PREFIX}/") + 2 * _TOKEN_BYTES
_MAX_NAME_BYTES = 12
"""Of a socket in the folder: "api63.100000", "oversize-15"."""
_LOCK = "owner.lock"
_JANITOR = 'read -r _; exec rm -rf -- "$0"'


class RuntimeDir:
    """One folder. Made by `create`; `close` removes it. Thread: one owner."""

    def __init__(self, path: Path, lock_fd: int, janitor: "subprocess.Popen[bytes]") -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._janitor = janitor

    @classmethod
    def create(cls, parent: Path | None = None) -> "RuntimeDir":
        """Make a new folder, and remove those that were left behind.

        parent: where; None: the system's folder for temporary files. Raises ConfigError when its path is too long for
        the addresses of sockets.
        """
        base = parent or Path(tempfile.gettempdir())
        num_free_bytes = MAX_IPC_PATH_BYTES - _MAX_NAME_BYTES - _FOLDER_BYTES
        if len(os.fsencode(base)) > num_free_bytes:
            raise ConfigError(
                "TMPDIR", f"{base} is too long for the sockets in it; at most {num_free_bytes} bytes, please"
            )
        _remove_abandoned(base)
        path = base / f"{_PREFIX}{secrets.token_hex(_TOKEN_BYTES)}"
        # Before there is a folder, so that there is no moment in which nobody would remove it. Not a
        # ChildProcess: those die with their parent, and this one has its work to do just then.
        janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        path.mkdir(mode=0o700)
        # Locked before it has its name: an owner that starts now never sees it unlocked.
        lock_fd = os.open(path / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        (path / "new").rename(path / _LOCK)
        return cls(path, lock_fd, janitor)

    def address(self, name: str) -> str:
        """ZMQ address of the socket `name` in this folder."""
        return f"ipc://{self.path}/{name}"

    def close(self) -> None:
        """Remove the folder, let go of the lock and the janitor. Idempotent."""
        if self._lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = -1
            self._janitor.communicate()


def _remove_abandoned(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # not ours, gone already, or of an owner that is just starting
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:  # in use
            pass
        finally:
            os.close(fd)
