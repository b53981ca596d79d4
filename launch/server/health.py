"""What the operator's machines ask: does the process live, does the cluster serve, does it get on.

Called by: app.py. No key is asked for here. All answers come from what the supervisor said last; none waits.

/health           200 as long as this process answers
/ready            200 while at least `cluster.min_ready_replicas` serve, and the server is neither draining nor paused
/health/progress  503 while a rank or an engine core stands still for more than half of the time after which the
                  supervisor ends it. A long prefill, a start, and having nothing to do are no standstill
/cluster          the plan, and state, pid, epoch, restarts and last error of every process
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...cluster.supervision_events import ChildKind, ChildState
from .errors import RETRY_SOON_S
from .routes import json_response
from .service import Service


async def health(service: Service, request: Request) -> Response:
    """GET /health."""
    return Response(status_code=200)


async def ready(service: Service, request: Request) -> Response:
    """GET /ready."""
    num_ready, fleet = service.cluster.num_ready, service.link.fleet
    is_paused = fleet is not None and fleet.is_paused
    is_enough = num_ready >= max(1, service.min_ready_replicas)
    if service.gate.is_draining:
        status = "draining"
    elif is_paused:
        status = "paused"
    elif is_enough:
        status = "ready"
    else:
        status = "degraded" if num_ready else "starting"
    given_up = [
        process.role
        for process in (fleet.processes if fleet is not None else [])
        if process.kind is ChildKind.ENGINE_CORE and process.state is ChildState.GIVEN_UP
    ]
    body = {
        "status": status,
        "replicas_ready": num_ready,
        "replicas": len(service.cluster.replicas),
        "min_ready_replicas": service.min_ready_replicas,
        "given_up": given_up,
    }
    response = json_response(body, 200 if status == "ready" else 503)
    if status != "ready":
        response.headers["Retry-After"] = str(round(RETRY_SOON_S))
    return response


async def progress(service: Service, request: Request) -> Response:
    """GET /health/progress."""
    fleet = service.link.fleet
    stuck = fleet.stuck if fleet is not None else []
    return json_response({"status": "stuck" if stuck else "ok", "stuck": stuck}, 503 if stuck else 200)


async def cluster(service: Service, request: Request) -> Response:
    """GET /cluster."""
    fleet = service.link.fleet
    body: dict[str, Any] = {"processes": [], "replicas": [], "operation": None, "is_paused": False}
    if fleet is not None:
        ranks: dict[int, list[dict[str, Any]]] = {}
        for rank in fleet.ranks:
            ranks.setdefault(rank.dp_rank, []).append(
                {"tp_rank": rank.tp_rank, "host": rank.host, "device": rank.device, "pid": rank.pid}
            )
        body = {
            "processes": fleet.processes,
            "replicas": [
                {
                    "dp_rank": replica.dp_rank,
                    "state": replica.state,
                    "epoch": replica.epoch,
                    "weights_version": replica.weights_version,
                    "max_model_len": replica.max_model_len,
                    "ranks": ranks.get(replica.dp_rank, []),
                }
                for replica in fleet.replicas
            ],
            "operation": fleet.operation,
            "is_paused": fleet.is_paused,
        }
    return json_response(body)
