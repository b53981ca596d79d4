"""Operators at work on a cluster under live streams: what they ask for is done, and no stream notices.

One cluster of two replicas for the whole file; each test leaves it whole and active.
"""

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.children import is_gone, wait_until
from support.clients import ask
from support.launch import TINY_MODEL, Cluster, running_cluster

KEY = "open sesame"
PROMPTS = [f"Licensed under the Apache License, Version {index}" for index in range(8)]
MAX_TOKENS = 150

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "key").write_text(KEY)
    arguments = [str(TINY_MODEL), "--dp", "2", "--device", "cpu", "--served-model-name", "tiny"]
    with running_cluster(folder, *arguments, "--admin-key-file", str(folder / "key")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[str]:
    return stream(cluster)


def stream(cluster: Cluster) -> list[str]:
    return ask(cluster, PROMPTS, max_tokens=MAX_TOKENS, stream=True)


def post(cluster: Cluster, path: str, body: dict[str, Any] | None = None, *, status: int = 200) -> Any:
    response = httpx.post(
        f"{cluster.url}/admin/{path}",
        json=body or {},
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=120,
    )
    assert response.status_code == status, f"{response.text}\n{cluster.story()}"
    return response.json()


def get(cluster: Cluster, path: str) -> Any:
    return httpx.get(f"{cluster.url}/{path}", timeout=30).json()


def all_ok(answer: Any, *dp_ranks: int) -> bool:
    return [(replica["dp_rank"], replica["ok"]) for replica in answer["replicas"]] == [
        (dp_rank, True) for dp_rank in dp_ranks
    ]


def while_streaming(cluster: Cluster, act: Callable[[], None]) -> list[str]:
    """Stream all prompts, and act meanwhile."""
    texts: list[list[str]] = []
    thread = threading.Thread(target=lambda: texts.append(stream(cluster)))
    thread.start()
    try:
        act()
    finally:
        thread.join(120)
    assert texts, "the streams failed"
    return texts[0]


def states(cluster: Cluster) -> dict[int, str]:
    return {replica["dp_rank"]: replica["state"] for replica in get(cluster, "cluster")["replicas"]}


def test_a_replica_is_drained_and_resumed_under_streams(cluster: Cluster, undisturbed: list[str]) -> None:
    def act() -> None:
        assert all_ok(post(cluster, "replicas/1/drain"), 1)
        assert states(cluster) == {0: "ready", 1: "withheld"}
        # The last one that serves stays.
        assert "last replica" in post(cluster, "replicas/0/drain", status=409)["error"]["message"]
        assert all_ok(post(cluster, "replicas/1/resume"), 1)

    assert while_streaming(cluster, act) == undisturbed
    assert states(cluster) == {0: "ready", 1: "ready"}
    cluster.wait_all_blocks_free(2)


@pytest.mark.full  # a reload restarts them one by one as well
def test_all_replicas_are_restarted_one_by_one_under_streams(
    cluster: Cluster, undisturbed: list[str]
) -> None:
    before = cluster.pids()

    texts = while_streaming(cluster, lambda: all_ok(post(cluster, "restart"), 0, 1))

    assert texts == undisturbed
    after = cluster.pids()
    for title in ("phalanx dp0", "phalanx dp1", "phalanx dp0 tp0", "phalanx dp1 tp0"):
        assert is_gone(before[title])
        assert after[title] != before[title]
    assert [process["num_failures"] for process in get(cluster, "cluster")["processes"]] == [0, 0, 0, 0]


def test_other_weights_are_loaded_replica_by_replica(
    cluster: Cluster, tmp_path: Path, undisturbed: list[str]
) -> None:
    shutil.copytree(TINY_MODEL, tmp_path / "next")

    assert all_ok(post(cluster, "reload", {"path": str(tmp_path / "next"), "version": "v2"}), 0, 1)

    assert get(cluster, "v1/models")["data"][0]["weights_version"] == "v2"
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()
    assert answer["system_fingerprint"] == "v2"
    assert stream(cluster) == undisturbed


@pytest.mark.full
def test_weights_that_cannot_be_loaded_leave_the_old_ones(
    cluster: Cluster, tmp_path: Path, undisturbed: list[str]
) -> None:
    assert "there is no" in post(cluster, "reload", {"path": "/nowhere"}, status=400)["error"]["message"]
    shutil.copytree(TINY_MODEL, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no tensors")
    version = get(cluster, "v1/models")["data"][0]["weights_version"]

    answer = post(cluster, "reload", {"path": str(tmp_path / "broken"), "version": "v3"}, status=500)

    assert [replica["ok"] for replica in answer["replicas"]] == [False, False]
    assert "not tried" in answer["replicas"][1]["problem"]
    assert get(cluster, "v1/models")["data"][0]["weights_version"] == version
    assert states(cluster) == {0: "ready", 1: "ready"}
    assert stream(cluster) == undisturbed


def test_a_pause_holds_streams_and_a_resume_lets_them_go(cluster: Cluster, undisturbed: list[str]) -> None:
    assert all_ok(post(cluster, "pause"), 0, 1)
    assert httpx.get(f"{cluster.url}/ready").json()["status"] == "paused"

    def act() -> None:
        waiting = r"phalanx_num_requests_(?:waiting|running)\{[^}]*\} ([1-9]\S*)"
        wait_until(
            lambda: bool(re.search(waiting, httpx.get(f"{cluster.url}/metrics").text)),
            timeout_s=20,
            what="requests that wait",
        )
        assert httpx.get(f"{cluster.url}/health/progress").status_code == 200
        assert all_ok(post(cluster, "resume"), 0, 1)

    assert while_streaming(cluster, act) == undisturbed


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.full), 2])
def test_replicas_sleep_and_wake(cluster: Cluster, undisturbed: list[str], level: int) -> None:
    assert all_ok(post(cluster, "sleep", {"level": level}), 0, 1)
    assert states(cluster) == {0: "withheld", 1: "withheld"}
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).status_code == 503

    assert all_ok(post(cluster, "wake"), 0, 1)
    assert stream(cluster) == undisturbed


def test_prefixes_are_forgotten(cluster: Cluster) -> None:
    assert all_ok(post(cluster, "prefix_cache/reset"), 0, 1)


def test_the_cluster_grows_and_shrinks_under_streams(cluster: Cluster, undisturbed: list[str]) -> None:
    def act() -> None:
        assert all_ok(post(cluster, "scale", {"dp": 3}), 2)
        assert states(cluster) == {0: "ready", 1: "ready", 2: "ready"}
        assert "phalanx dp2 tp0" in cluster.pids()
        assert all_ok(post(cluster, "scale", {"dp": 1}), 1, 2)

    assert while_streaming(cluster, act) == undisturbed
    assert states(cluster) == {0: "ready"}
    assert {"phalanx dp1", "phalanx dp2"} & set(cluster.pids()) == set()
    assert stream(cluster) == undisturbed
    assert all_ok(post(cluster, "scale", {"dp": 2}), 1)
    assert stream(cluster) == undisturbed
