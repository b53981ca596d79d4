"""Stops, deaths and boot failures of a whole cluster: what the operator sees, and that nothing survives."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.children import wait_until
from support.launch import TINY_MODEL, Cluster

ARGUMENTS = (str(TINY_MODEL), "--tp", "2", "--dp", "2", "--device", "cpu", "--served-model-name", "tiny")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that has just been started."""
    cluster = Cluster(tmp_path, *ARGUMENTS)
    yield cluster
    cluster.process.kill()
    cluster.process.wait()


def test_one_interrupt_finishes_running_streams_and_leaves_nothing(cluster: Cluster) -> None:
    cluster.wait_ready()
    pids = cluster.tree()
    body = {"model": "tiny", "prompt": "Licensed", "max_tokens": 120, "stream": True, "ignore_eos": True}

    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        cluster.interrupt()
        rest = [line for line in lines if line]

    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2].replace(" ", "")
    assert cluster.wait() == 0, cluster.story()
    cluster.assert_nothing_left(pids)


def test_three_interrupts_stop_at_once_and_leave_nothing(cluster: Cluster) -> None:
    cluster.wait_ready()
    pids = cluster.tree()
    body = {"model": "tiny", "prompt": "Licensed", "max_tokens": 400, "stream": True, "ignore_eos": True}

    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
        for count in (1, 2, 3):
            cluster.interrupt()
            if count < 3:
                word = ("finishing", "stopping")[count - 1]
                wait_until(
                    lambda word=word: word in cluster.stderr or cluster.process.poll() is not None,
                    timeout_s=10,
                    what=word,
                )
    cluster.wait()
    cluster.assert_nothing_left(pids)


def test_an_interrupt_while_loading_leaves_nothing(cluster: Cluster) -> None:
    wait_until(lambda: "tp1 import" in cluster.stderr, timeout_s=60, what="the start of the workers")
    pids = cluster.tree()

    cluster.interrupt()

    assert cluster.wait() == 130, cluster.story()
    cluster.assert_nothing_left(pids)


@pytest.mark.parametrize(
    "moment",
    ["dp1: import", "tp1 import", pytest.param("tp1 weights", marks=pytest.mark.full), "ready after"],
)
def test_nothing_survives_the_supervisor(cluster: Cluster, moment: str) -> None:
    wait_until(lambda: moment in cluster.stderr + cluster.stdout, timeout_s=90, what=moment)
    pids = cluster.tree()
    assert pids

    cluster.process.kill()

    cluster.wait()
    cluster.assert_nothing_left(pids)


@pytest.mark.parametrize("victim", [pytest.param("dp0", marks=pytest.mark.full), "api0"])
def test_without_restarts_the_last_of_a_kind_ends_the_cluster(tmp_path: Path, victim: str) -> None:
    arguments = [str(TINY_MODEL), "--device", "cpu", "--set", "cluster.max_restarts=0"]
    cluster = Cluster(tmp_path, *arguments).wait_ready()
    pids = cluster.tree()

    os.kill(cluster.pids()[f"phalanx {victim}"], signal.SIGKILL)

    assert cluster.wait() == 1, cluster.story()
    assert f"{victim} was killed by signal 9" in cluster.stderr
    assert "given up" in cluster.stderr
    cluster.assert_nothing_left(pids)


def run_to_its_end(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-m", "phalanx.launch", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )


def test_a_port_in_use_is_one_sentence_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run_to_its_end(*ARGUMENTS, "--port", str(taken.getsockname()[1]))

    assert result.returncode == 2
    assert "server.port" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("/nonexistent/model",), "model"),
        ((str(Path(__file__).parent),), "config.json"),
        ((str(TINY_MODEL), "--device", "cpu", "--tp", "7"), "parallel.tensor_parallel_size"),
        ((str(TINY_MODEL), "--device", "cuda", "--tp", "64"), "GPU"),
        ((str(TINY_MODEL), "--device", "tpu"), "parallel.device"),
        ((str(TINY_MODEL), "--set", "cache.block_size=17"), "cache.block_size"),
    ],
    ids=["no folder", "not a model", "tp above heads", "too few GPUs", "no such device", "bad setting"],
)
def test_a_bad_setting_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], word: str) -> None:
    result = run_to_its_end(*arguments, "--port", "0")

    assert result.returncode == 2, result.stderr
    assert word in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr


def test_a_dry_run_shows_the_plan_and_starts_nothing() -> None:
    result = run_to_its_end(*ARGUMENTS, "--dry-run")

    assert result.returncode == 0
    assert "dp1 tp1" in result.stdout
