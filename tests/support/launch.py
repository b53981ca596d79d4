"""A cluster as its operator starts it: `cluster-launch` in a process of its own, seen from outside."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from support.children import is_gone, wait_until

TINY_MODEL = Path(__file__).parents[1] / "fixtures" / "tiny-llama"
START_S = 90.0
"""For a cluster to be ready. Two loaded cores import torch once for each rank."""


class Cluster:
    """One running `cluster-launch`. Its files and sockets live under `folder`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._out = folder / "stdout"
        self._err = folder / "stderr"
        self.temp = folder / "t"
        self.temp.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TMPDIR": str(self.temp),
        }
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                # Killed with the test run: a run that is cut short has nobody to stop its clusters.
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    sys.executable,
                    "-m",
                    "phalanx.launch",
                    *arguments,
                    "--port",
                    "0",
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                # Ctrl-C of the test run is the test runner's business.
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return self._out.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self._err.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        found = re.search(r"^ready after .* at (http://\S+)$", self.stdout, re.MULTILINE)
        assert found, self.story()
        return found.group(1)

    def story(self) -> str:
        """All that it printed, for a failure's message."""
        return f"exit code {self.process.poll()}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def wait_ready(self) -> "Cluster":
        def settled() -> bool:
            return "\nready after " in self.stdout or self.process.poll() is not None

        wait_until(settled, timeout_s=START_S, what="the start")
        assert self.process.poll() is None, self.story()
        return self

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for its end; return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout_s} s\n{self.story()}") from None

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def worker_pid(self, dp_rank: int, tp_rank: int) -> int:
        return self.pids()[f"phalanx dp{dp_rank} tp{tp_rank}"]

    def pids(self) -> dict[str, int]:
        """Its processes by title, the supervisor excepted."""
        titles = {}
        for pid in self.tree():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            titles[command] = pid
        return titles

    def tree(self) -> list[int]:
        """All its descendants."""
        found: list[int] = []
        todo = [self.process.pid]
        while todo:
            pid = todo.pop()
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                try:
                    children = [int(text) for text in task.read_text().split()]
                except (FileNotFoundError, ProcessLookupError):
                    continue
                found += children
                todo += children
        return found

    def used_blocks(self) -> dict[str, float]:
        """KV blocks in use by dp_rank, as the metrics say. At rest none is, whatever the prefix cache keeps."""
        text = httpx.get(f"{self.url}/metrics").text

        def rows(name: str) -> dict[str, float]:
            found = re.findall(rf'^{name}\{{[^}}]*dp_rank="(\d+)"[^}}]*\}} (\S+)$', text, re.MULTILINE)
            return {dp_rank: float(value) for dp_rank, value in found}

        total, free = rows("phalanx_kv_blocks_total"), rows("phalanx_kv_blocks_free")
        return {dp_rank: total[dp_rank] - free[dp_rank] for dp_rank in total}

    def wait_all_blocks_free(self, num_replicas: int) -> None:
        """Wait until no replica has a block in use."""
        idle = {str(dp_rank): 0.0 for dp_rank in range(num_replicas)}
        wait_until(lambda: self.used_blocks() == idle, timeout_s=20, what="the return of all blocks")

    def assert_nothing_left(self, pids: list[int], *, timeout_s: float = 5.0) -> None:
        """No process of `pids` lives, and no file of the cluster is left."""
        wait_until(
            lambda: all(is_gone(pid) for pid in pids), timeout_s=timeout_s, what="the end of all processes"
        )
        wait_until(
            lambda: not list(self.temp.iterdir()), timeout_s=timeout_s, what="the end of the socket folder"
        )


@contextmanager
def running_cluster(folder: Path, *arguments: str) -> Iterator[Cluster]:
    """Start a cluster, wait until it is ready, and stop it in order at the end."""
    cluster = Cluster(folder, *arguments)
    try:
        cluster.wait_ready()
        yield cluster
        pids = cluster.tree()
        cluster.interrupt()
        assert cluster.wait() == 0, cluster.story()
        cluster.assert_nothing_left(pids)
    finally:
        if cluster.process.poll() is None:
            cluster.process.kill()
            cluster.process.wait()
