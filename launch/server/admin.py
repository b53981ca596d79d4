"""The administrator's routes: what operators may do to a cluster that serves. Behind a key of their own.

Called by: app.py, which asks for the key. Every route waits for the end of what it asks for, and answers with a result
for each replica: 200 when all went well, 500 when it failed on one at least, and 400, 404 or 409 when nothing was done.
A client that leaves meanwhile leaves the operation alone. One operation at a time; a second one gets 409.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...cluster.messages import AdminKind, AdminResult, AdminStatus
from ...workers.sleep import SleepLevel
from .errors import ApiError, invalid
from .routes import json_response, read_body
from .service import Service
from .validation import decode_body

T = TypeVar("T")
Handler = Callable[[Service, Request], Awaitable[Response]]

_STATUSES = {
    AdminStatus.DONE: 200,
    AdminStatus.FAILED: 500,
    AdminStatus.INVALID: 400,
    AdminStatus.UNKNOWN: 404,
    AdminStatus.CONFLICT: 409,
}
_LARGEST_TIMEOUT_S = 86400.0
SmallInt = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
"""What the message to the supervisor can hold, and more than any number of replicas."""


class TimedBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """timeout_s: for all of it; None: `cluster.admin_timeout_s` for each replica."""

    timeout_s: float | None = None


class ReloadBody(TimedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """path: of the new weights, on the server's machine; version: what clients are told, None: the folder's name."""

    path: Annotated[str, msgspec.Meta(max_length=4096)]
    version: Annotated[str, msgspec.Meta(max_length=256)] | None = None


class SleepBody(TimedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """level: 1 keeps the weights in the host's memory, 2 drops them. dp_rank: None: all replicas."""

    level: SmallInt = 1
    dp_rank: SmallInt | None = None


class WakeBody(TimedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """dp_rank: None: all replicas that sleep."""

    dp_rank: SmallInt | None = None


class ScaleBody(TimedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """dp: how many replicas there shall be."""

    dp: SmallInt


class ReplicaOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's part of an answer. problem: None when all went well."""

    dp_rank: int
    ok: bool
    problem: str | None


class AdminAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An operation's end."""

    status: AdminStatus
    problem: str | None
    replicas: list[ReplicaOutcome]


def replica_command(kind: AdminKind) -> Handler:
    """Make the handler of POST /admin/replicas/{dp_rank}/..."""

    async def handle(service: Service, request: Request) -> Response:
        text = request.path_params["dp_rank"]
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise ApiError(404, f"there is no replica {text}", code="unknown_replica")
        body = await _read(service, request, TimedBody)
        return _answer(await service.link.command(kind, dp_rank=int(text), timeout_s=_timeout_s(body)))

    return handle


def cluster_command(kind: AdminKind) -> Handler:
    """Make the handler of a command to all replicas that takes nothing but a timeout."""

    async def handle(service: Service, request: Request) -> Response:
        body = await _read(service, request, TimedBody)
        return _answer(await service.link.command(kind, timeout_s=_timeout_s(body)))

    return handle


async def reload(service: Service, request: Request) -> Response:
    """POST /admin/reload: other weights, replica by replica."""
    body = await _read(service, request, ReloadBody)
    result = await service.link.command(
        AdminKind.RELOAD, path=body.path, version=body.version, timeout_s=_timeout_s(body)
    )
    return _answer(result)


async def sleep(service: Service, request: Request) -> Response:
    """POST /admin/sleep: give the memory of weights and KV cache back."""
    body = await _read(service, request, SleepBody)
    if body.level not in list(SleepLevel):
        raise invalid("level", f"must be 1 or 2, not {body.level}")
    result = await service.link.command(
        AdminKind.SLEEP, level=SleepLevel(body.level), dp_rank=body.dp_rank, timeout_s=_timeout_s(body)
    )
    return _answer(result)


async def wake(service: Service, request: Request) -> Response:
    """POST /admin/wake: the end of a sleep."""
    body = await _read(service, request, WakeBody)
    return _answer(
        await service.link.command(AdminKind.WAKE, dp_rank=body.dp_rank, timeout_s=_timeout_s(body))
    )


async def scale(service: Service, request: Request) -> Response:
    """POST /admin/scale: more or fewer replicas."""
    body = await _read(service, request, ScaleBody)
    return _answer(
        await service.link.command(AdminKind.SCALE, data_parallel_size=body.dp, timeout_s=_timeout_s(body))
    )


ADMIN_ROUTES: dict[str, Handler] = {
    "/admin/replicas/{dp_rank}/drain": replica_command(AdminKind.DRAIN),
    "/admin/replicas/{dp_rank}/resume": replica_command(AdminKind.RESUME),
    "/admin/replicas/{dp_rank}/restart": replica_command(AdminKind.RESTART),
    "/admin/restart": cluster_command(AdminKind.RESTART),
    "/admin/reload": reload,
    "/admin/pause": cluster_command(AdminKind.PAUSE),
    "/admin/resume": cluster_command(AdminKind.UNPAUSE),
    "/admin/sleep": sleep,
    "/admin/wake": wake,
    "/admin/prefix_cache/reset": cluster_command(AdminKind.RESET_PREFIX_CACHE),
    "/admin/scale": scale,
}
"""All of them are POST."""


async def _read(service: Service, request: Request, kind: type[T]) -> T:
    """Read a body; none is as good as an empty one."""
    return decode_body(await read_body(service, request) or b"{}", kind)


def _timeout_s(body: TimedBody) -> float | None:
    if body.timeout_s is not None and not 0 < body.timeout_s <= _LARGEST_TIMEOUT_S:
        raise invalid("timeout_s", f"must be in (0, {_LARGEST_TIMEOUT_S:g}], not {body.timeout_s}")
    return body.timeout_s


def _answer(result: AdminResult) -> Response:
    if result.status in (AdminStatus.INVALID, AdminStatus.UNKNOWN, AdminStatus.CONFLICT):
        raise ApiError(
            _STATUSES[result.status],
            result.problem or result.status,
            param=result.field,
            code=result.status,
        )
    answer = AdminAnswer(
        status=result.status,
        problem=result.problem,
        replicas=[
            ReplicaOutcome(dp_rank=replica.dp_rank, ok=replica.problem is None, problem=replica.problem)
            for replica in result.replicas
        ],
    )
    return json_response(answer, _STATUSES[result.status])
