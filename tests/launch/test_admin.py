"""The administrator's routes, health and metrics of the cluster, over a supervisor that the test writes down."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from phalanx.cluster.messages import (
    AdminKind,
    AdminResult,
    AdminStatus,
    FleetApplied,
    FleetUpdate,
    ProcessInfo,
    RankInfo,
    ReplicaInfo,
    ReplicaResult,
    ReplicaState,
    StuckRank,
)
from phalanx.cluster.replay import ReplayStats
from phalanx.cluster.supervision_events import ChildKind, ChildState, ReplicaMode
from phalanx.launch.config import LaunchConfig
from phalanx.launch.metrics import ServerMetrics
from phalanx.launch.preflight import check_other_weights
from phalanx.launch.server.admin import ADMIN_ROUTES
from phalanx.launch.server.app import create_app
from phalanx.launch.server.cluster_link import ClusterLink
from phalanx.launch.server.service import Service
from phalanx.shm.errors import ConfigError
from phalanx.workers.config import ModelConfig
from phalanx.workers.sleep import SleepLevel
from support.launch import TINY_MODEL
from support.server import FakeCluster, FakeLink, make_service

KEY = {"Authorization": "Bearer sesame"}


def ask(service: Service, method: str, path: str, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(service), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def process(role: str, **changes: Any) -> ProcessInfo:
    values: dict[str, Any] = {
        "role": role,
        "kind": ChildKind.ENGINE_CORE,
        "state": ChildState.READY,
        "mode": ReplicaMode.ACTIVE,
        "pid": 100,
        "epoch": 0,
        "num_restarts": 0,
        "num_failures": 0,
        "num_hangs": 0,
        "last_error": None,
    }
    return ProcessInfo(**{**values, **changes})


def replica(dp_rank: int, state: ReplicaState = ReplicaState.READY, version: str = "v1") -> ReplicaInfo:
    return ReplicaInfo(
        dp_rank=dp_rank, epoch=0, state=state, input_address="ipc://x", weights_version=version
    )


FLEET = FleetUpdate(
    sequence=3,
    replicas=[replica(0), replica(1, ReplicaState.LOST)],
    processes=[
        process("dp0", num_restarts=2, num_failures=1, num_hangs=1, last_error="dp0 was killed by signal 9"),
        process("dp1", state=ChildState.GIVEN_UP, pid=None),
    ],
    ranks=[RankInfo(dp_rank=0, tp_rank=0, host="here", device="cpu", pid=7)],
)


def test_every_route_asks_for_the_administrators_key() -> None:
    link = FakeLink()
    with_key = make_service(link=link, admin_key="sesame", api_key="other")
    without = make_service(link=link)

    for path in ADMIN_ROUTES:
        path = path.replace("{dp_rank}", "0")
        assert ask(without, "POST", path, json={}).status_code == 403
        assert ask(with_key, "POST", path, json={}).status_code == 401
        wrong = ask(with_key, "POST", path, json={}, headers={"Authorization": "Bearer other"})
        assert wrong.status_code == 401
        assert wrong.headers["www-authenticate"] == "Bearer"
    assert link.commands == []


@pytest.mark.parametrize(
    ("path", "body", "kind", "fields"),
    [
        ("replicas/1/drain", {}, AdminKind.DRAIN, {"dp_rank": 1}),
        ("replicas/0/resume", {"timeout_s": 2.5}, AdminKind.RESUME, {"dp_rank": 0, "timeout_s": 2.5}),
        ("replicas/12/restart", {}, AdminKind.RESTART, {"dp_rank": 12}),
        ("restart", {}, AdminKind.RESTART, {}),
        ("reload", {"path": "/m", "version": "v2"}, AdminKind.RELOAD, {"path": "/m", "version": "v2"}),
        ("pause", {}, AdminKind.PAUSE, {}),
        ("resume", {}, AdminKind.UNPAUSE, {}),
        ("sleep", {"level": 2}, AdminKind.SLEEP, {"level": SleepLevel.DROP}),
        ("wake", {"dp_rank": 1}, AdminKind.WAKE, {"dp_rank": 1}),
        ("prefix_cache/reset", {}, AdminKind.RESET_PREFIX_CACHE, {}),
        ("scale", {"dp": 4}, AdminKind.SCALE, {"data_parallel_size": 4}),
    ],
)
def test_each_route_is_one_command(
    path: str, body: dict[str, Any], kind: AdminKind, fields: dict[str, Any]
) -> None:
    link = FakeLink()
    link.result = AdminResult(
        command_id=1, status=AdminStatus.DONE, replicas=[ReplicaResult(dp_rank=1, problem=None)]
    )
    service = make_service(link=link, admin_key="sesame")

    answer = ask(service, "POST", f"/admin/{path}", json=body, headers=KEY)

    assert answer.status_code == 200
    assert answer.json() == {
        "status": "done",
        "problem": None,
        "replicas": [{"dp_rank": 1, "ok": True, "problem": None}],
    }
    assert link.commands == [(kind, fields)]


def test_no_body_is_as_good_as_an_empty_one() -> None:
    link = FakeLink()
    service = make_service(link=link, admin_key="sesame")

    assert ask(service, "POST", "/admin/pause", headers=KEY).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("sleep", {"level": 3}, 400, "level"),
        ("sleep", {"level": True}, 400, "level"),
        ("scale", {}, 400, "dp"),
        ("scale", {"dp": "many"}, 400, "dp"),
        ("pause", {"timeout_s": 0}, 400, "timeout_s"),
        ("pause", {"timeout": 5}, 400, "timeout"),
        ("reload", {"version": "v2"}, 400, "path"),
        ("replicas/x/drain", {}, 404, "x"),
        ("replicas/-1/drain", {}, 404, "-1"),
        ("replicas/99999999999/drain", {}, 404, "99999999999"),
        ("nothing", {}, 404, "nothing"),
    ],
)
def test_a_bad_command_is_refused_by_name(path: str, body: dict[str, Any], status: int, word: str) -> None:
    link = FakeLink()
    service = make_service(link=link, admin_key="sesame")

    answer = ask(service, "POST", f"/admin/{path}", json=body, headers=KEY)

    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]
    assert link.commands == []


@pytest.mark.parametrize(
    ("status", "code"),
    [(AdminStatus.INVALID, 400), (AdminStatus.UNKNOWN, 404), (AdminStatus.CONFLICT, 409)],
)
def test_a_refusal_of_the_supervisor_has_a_status_of_its_own(status: AdminStatus, code: int) -> None:
    link = FakeLink(result=AdminResult(command_id=1, status=status, problem="not now"))
    answer = ask(make_service(link=link, admin_key="sesame"), "POST", "/admin/restart", json={}, headers=KEY)

    assert (answer.status_code, answer.json()["error"]["message"]) == (code, "not now")


def test_what_failed_on_one_replica_is_said_of_each() -> None:
    replicas = [ReplicaResult(dp_rank=0, problem="no room"), ReplicaResult(dp_rank=1, problem=None)]
    link = FakeLink(
        result=AdminResult(command_id=1, status=AdminStatus.FAILED, problem="dp0: no room", replicas=replicas)
    )
    answer = ask(make_service(link=link, admin_key="sesame"), "POST", "/admin/wake", json={}, headers=KEY)

    assert answer.status_code == 500
    assert answer.json()["replicas"] == [
        {"dp_rank": 0, "ok": False, "problem": "no room"},
        {"dp_rank": 1, "ok": True, "problem": None},
    ]


def test_ready_says_who_was_given_up_and_asks_for_the_minimum() -> None:
    cluster = FakeCluster(num_ready=1, replicas={0: None, 1: None})
    enough = ask(make_service(cluster=cluster, link=FakeLink(fleet=FLEET)), "GET", "/ready")
    too_few = ask(
        make_service(cluster=cluster, link=FakeLink(fleet=FLEET), min_ready_replicas=2), "GET", "/ready"
    )

    assert (enough.status_code, enough.json()["given_up"]) == (200, ["dp1"])
    assert (too_few.status_code, too_few.json()["status"]) == (503, "degraded")
    assert too_few.headers["retry-after"] == "1"


def test_ready_says_no_in_a_pause() -> None:
    paused = FleetUpdate(replicas=[replica(0)], is_paused=True)
    answer = ask(make_service(link=FakeLink(fleet=paused)), "GET", "/ready")

    assert (answer.status_code, answer.json()["status"]) == (503, "paused")


def test_progress_names_who_stands_still() -> None:
    stuck = StuckRank(role="dp0 tp1", phase="forward", problem="stands still for 20 s")
    bad = ask(
        make_service(link=FakeLink(fleet=FleetUpdate(replicas=[], stuck=[stuck]))), "GET", "/health/progress"
    )
    good = ask(make_service(link=FakeLink(fleet=FLEET)), "GET", "/health/progress")

    assert bad.status_code == 503
    assert bad.json()["stuck"] == [
        {"role": "dp0 tp1", "phase": "forward", "problem": "stands still for 20 s"}
    ]
    assert (good.status_code, good.json()) == (200, {"status": "ok", "stuck": []})
    assert ask(make_service(), "GET", "/health/progress").status_code == 200


def test_the_cluster_is_shown_with_its_processes_and_ranks() -> None:
    body = ask(make_service(link=FakeLink(fleet=FLEET)), "GET", "/cluster").json()

    assert [(entry["role"], entry["state"], entry["last_error"]) for entry in body["processes"]] == [
        ("dp0", "ready", "dp0 was killed by signal 9"),
        ("dp1", "given up", None),
    ]
    assert body["replicas"][0]["ranks"] == [{"tp_rank": 0, "host": "here", "device": "cpu", "pid": 7}]
    assert ask(make_service(), "GET", "/cluster").json()["processes"] == []


@pytest.mark.parametrize(
    ("fleet", "version"),
    [
        (FLEET, "v1"),
        (FleetUpdate(replicas=[replica(0, version="v2"), replica(1, version="v1")]), "v1,v2"),
        (FleetUpdate(replicas=[replica(0, ReplicaState.STARTING)]), None),
    ],
)
def test_answers_and_the_list_of_models_say_which_weights_serve(
    fleet: FleetUpdate, version: str | None
) -> None:
    service = make_service(link=FakeLink(fleet=fleet))
    body = {"model": "tiny", "prompt": "a", "max_tokens": 20}

    assert ask(service, "GET", "/v1/models").json()["data"][0]["weights_version"] == version
    assert ask(service, "POST", "/v1/completions", json=body).json()["system_fingerprint"] == version


def test_metrics_of_processes_and_replays() -> None:
    stats = ReplayStats(num_replayed=4, num_expired=1, num_blamed=2, num_stale_outputs=9, num_parked=3)
    metrics = ServerMetrics("m", dict, lambda: 1, fleet=lambda: FLEET, replay=lambda: stats)

    text = metrics.render().decode()

    for line in (
        'phalanx_process_restarts_total{model_name="m",role="dp0"} 2.0',
        'phalanx_process_failures_total{model_name="m",role="dp0"} 1.0',
        'phalanx_process_hangs_total{model_name="m",role="dp0"} 1.0',
        'phalanx_requests_replayed_total{model_name="m"} 4.0',
        'phalanx_requests_expired_total{model_name="m"} 1.0',
        'phalanx_requests_blamed_total{model_name="m"} 2.0',
        'phalanx_requests_parked{model_name="m"} 3.0',
        'phalanx_ranks_stuck{model_name="m"} 0.0',
    ):
        assert line in text, line


def test_an_update_is_answered_once_requests_have_moved() -> None:
    told: list[object] = []
    link = ClusterLink(told.append, lambda update: told.append(update.sequence))

    link.take(FLEET)

    assert told == [3, msgspec.msgpack.encode(FleetApplied(sequence=3))]
    assert link.fleet is FLEET


def test_results_find_who_asked() -> None:
    async def run() -> list[AdminStatus]:
        link = ClusterLink(lambda data: None, lambda update: None)
        first = asyncio.create_task(link.command(AdminKind.PAUSE))
        second = asyncio.create_task(link.command(AdminKind.WAKE))
        await asyncio.sleep(0)
        link.take(AdminResult(command_id=2, status=AdminStatus.CONFLICT))
        link.take(AdminResult(command_id=7, status=AdminStatus.FAILED))
        link.take(AdminResult(command_id=1, status=AdminStatus.DONE))
        return [(await first).status, (await second).status]

    assert asyncio.run(run()) == [AdminStatus.DONE, AdminStatus.CONFLICT]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("scale", {"dp": 10**30}, "dp"),
        ("scale", {"dp": 2**31}, "dp"),
        ("sleep", {"dp_rank": 2**64}, "dp_rank"),
        ("sleep", {"level": -(10**30)}, "level"),
        ("wake", {"dp_rank": -(2**63) - 1}, "dp_rank"),
        ("reload", {"path": "/a" * 4096}, "path"),
        ("reload", {"path": "/a", "version": "v" * 257}, "version"),
    ],
)
def test_what_no_message_holds_is_refused_here(route: str, body: dict[str, Any], param: str) -> None:
    link = FakeLink()
    service = make_service(link=link, admin_key="sesame")

    response = ask(service, "POST", f"/admin/{route}", json=body, headers=KEY)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not link.commands


@pytest.mark.parametrize("name", ["none", "a" * 300, "nul\0", "pipe", "deep"])
def test_weights_that_cannot_be_read_are_refused_and_harm_nobody(tmp_path: Path, name: str) -> None:
    if name == "pipe":
        os.mkfifo(tmp_path / name)
    if name == "deep":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("[" * 100_000)
    config = LaunchConfig(model=ModelConfig(path=str(TINY_MODEL)))

    with pytest.raises(ConfigError) as caught:
        check_other_weights(config, str(tmp_path / name))

    assert caught.value.field == "path"
