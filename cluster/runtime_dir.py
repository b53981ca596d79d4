"""The folder of a cluster's unix sockets: private (0700), short-lived, and cleaned up by whoever is left.

Called by: the supervisor, which creates it and removes it at its end; the coordinator removes it when the
supervisor is killed; and if both are, the next cluster to start does. A lock on a file inside, held by the
supervisor, tells a folder in use from one that was left behind: the kernel drops the lock with its holder.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "phalanx-"
_LOCK = "supervisor.lock"


class RuntimeDir:
    """One cluster's folder. Made by `create`; `close` removes it."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, parent: Path | None = None) -> "RuntimeDir":
        """Make a new folder, and remove those that killed clusters left behind.

        parent: where; None: the system's folder for temporary files. Its path must be short: a socket's address
        holds 107 bytes.
        """
        base = parent or Path(tempfile.gettempdir())
        _remove_abandoned(base)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        # Locked before it has its name: a cluster that starts now never sees it unlocked.
        lock_fd = os.open(path / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        (path / "new").rename(path / _LOCK)
        return cls(path, lock_fd)

    def address(self, name: str) -> str:
        """ZMQ address of the socket `name` in this folder."""
        return f"ipc://{self.path}/{name}"

    def close(self) -> None:
        """Remove the folder and let go of the lock. Idempotent."""
        if self._lock_fd >= 0:
            remove(self.path)
            os.close(self._lock_fd)
            self._lock_fd = -1


def remove(path: Path) -> None:
    """Remove a runtime folder, whatever of it is still there."""
    shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # not ours, gone already, or not yet locked by a cluster that is just starting
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
        except BlockingIOError:  # in use
            pass
        finally:
            os.close(fd)
