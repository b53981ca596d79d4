"""Processes that stand still without dying: the replica is replaced, its requests go on, and health says who it was.

One cluster of two replicas for the whole file; each test leaves it whole again.
"""

import os
import re
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest

from support.children import is_gone, wait_until
from support.clients import ask
from support.launch import TINY_MODEL, Cluster, running_cluster

PROMPTS = [f"You may obtain a copy of the License at {index}" for index in range(8)]
MAX_TOKENS = 200
BACK_S = 90.0

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    arguments = [str(TINY_MODEL), "--dp", "2", "--device", "cpu", "--served-model-name", "tiny"]
    arguments += ["--set", "cluster.hang_timeout_s=5"]
    with running_cluster(tmp_path_factory.mktemp("cluster"), *arguments) as cluster:
        yield cluster


def hangs(cluster: Cluster, role: str) -> float:
    text = httpx.get(f"{cluster.url}/metrics", timeout=30).text
    found = re.search(
        rf'^phalanx_process_hangs_total\{{[^}}]*role="{role}"[^}}]*\}} (\S+)$', text, re.MULTILINE
    )
    assert found, text
    return float(found.group(1))


def is_whole(cluster: Cluster) -> bool:
    ready = httpx.get(f"{cluster.url}/ready", timeout=30)
    return ready.status_code == 200 and ready.json()["replicas_ready"] == 2


@pytest.mark.parametrize("victim", ["dp0", pytest.param("dp1 tp0", marks=pytest.mark.full)])
def test_streams_go_on_when_a_process_is_stopped(cluster: Cluster, victim: str) -> None:
    undisturbed = ask(cluster, PROMPTS, max_tokens=MAX_TOKENS, stream=True)
    role, pid = victim.partition(" ")[0], cluster.pids()[f"phalanx {victim}"]
    before = hangs(cluster, role)
    texts: list[list[str]] = []
    streams = threading.Thread(
        target=lambda: texts.append(ask(cluster, PROMPTS, max_tokens=MAX_TOKENS, stream=True))
    )

    os.kill(pid, signal.SIGSTOP)
    streams.start()
    stuck: list[dict[str, str]] = []

    def is_told() -> bool:
        answer = httpx.get(f"{cluster.url}/health/progress", timeout=30)
        stuck[:] = answer.json()["stuck"]
        return answer.status_code == 503

    wait_until(is_told, timeout_s=30, what="a word on who stands still")
    assert victim in [entry["role"] for entry in stuck]
    assert all("stands still" in entry["problem"] and entry["phase"] for entry in stuck)
    wait_until(lambda: is_gone(pid), timeout_s=30, what="the end of the stopped process")
    streams.join(120)

    assert texts == [undisturbed]
    wait_until(lambda: is_whole(cluster), timeout_s=BACK_S, what="both replicas")
    assert hangs(cluster, role) == before + 1
    assert f"{role} was killed: {victim} stands still" in cluster.stderr
    assert httpx.get(f"{cluster.url}/health/progress", timeout=30).status_code == 200


def test_after_all_of_it_every_process_serves(cluster: Cluster) -> None:
    processes = httpx.get(f"{cluster.url}/cluster", timeout=30).json()["processes"]

    assert {process["role"]: process["state"] for process in processes} == dict.fromkeys(
        ("coordinator", "dp0", "dp1", "api0"), "ready"
    )
