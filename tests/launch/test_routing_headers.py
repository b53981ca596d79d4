"""What a client may ask of the routing, and what it is told."""

import asyncio
import re
from typing import Any

import httpx
import pytest

from phalanx.cluster.routing import Decision, RoutingReason
from phalanx.launch.metrics import ServerMetrics
from phalanx.launch.server.app import create_app
from support.server import FakeCluster, FakeEngine, make_service

BODY = {"model": "tiny", "prompt": "Say it", "max_tokens": 20}
DECISION = Decision(dp_rank=3, reason=RoutingReason.PREFIX, scores={0: 9.04, 3: 1.0}, num_cached_tokens=4)


def post(engine: FakeEngine, headers: dict[str, str], **body: Any) -> httpx.Response:
    service = make_service(engine, FakeCluster(any_decision=DECISION))

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", json={**BODY, **body}, headers=headers)

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_which_replica_computed_it_and_on_request_why(stream: bool) -> None:
    plain = post(FakeEngine(), {}, stream=stream)
    assert plain.headers["x-phalanx-replica"] == "3"
    assert "x-phalanx-routing-reason" not in plain.headers

    explained = post(FakeEngine(), {"X-Phalanx-Explain": "1"}, stream=stream)
    assert explained.headers["x-phalanx-routing-reason"] == "prefix"
    assert explained.headers["x-phalanx-routing-scores"] == "0=9.0, 3=1.0"


def test_replica_and_session_reach_the_engine() -> None:
    engine = FakeEngine()
    post(engine, {"X-Phalanx-Replica": "1", "X-Session-Id": "abc"}, user="me")
    post(engine, {}, user="me")
    post(engine, {})

    assert [(options.dp_rank, options.session_id) for options in engine.options] == [
        (1, "abc"),
        (None, "me"),
        (None, None),
    ]


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "", "99999999999999999999"])
def test_a_replica_that_is_no_number_is_a_400_that_names_the_header(value: str) -> None:
    response = post(FakeEngine(), {"X-Phalanx-Replica": value})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Phalanx-Replica"


def test_a_session_of_endless_length_is_a_400() -> None:
    assert post(FakeEngine(), {}, user="x" * 300).json()["error"]["param"] == "user"


def test_every_reason_is_a_series_from_the_start() -> None:
    counts = {RoutingReason.PREFIX: 4}
    metrics = ServerMetrics("m", dict, lambda: 0, num_routed=lambda: counts, snapshot_age_s=lambda: 0.25)

    text = metrics.render().decode()

    found = re.findall(r'^phalanx_routing_decisions_total\{[^}]*reason="(\w+)"\} (\S+)$', text, re.MULTILINE)
    assert dict(found) == {**{str(reason): "0.0" for reason in RoutingReason}, "prefix": "4.0"}
    age = re.search(r"^phalanx_load_snapshot_age_seconds\S* (\S+)$", text, re.MULTILINE)
    assert age is not None
    assert 0.25 <= float(age.group(1)) < 5
