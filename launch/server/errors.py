"""Errors as HTTP answers, always in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Called by: app.py and routes.py. One function says which status an error of ours gets.
"""

import logging

import msgspec
from starlette.responses import Response

from ...cluster.errors import NoReplicaError
from ...engine.errors import (
    InvalidRequestError,
    PoisonousRequestError,
    QueueFullError,
    ReplicaLostError,
    RequestAbortedError,
    RequestTimeoutError,
)
from ...shm.errors import ServingError
from ...workers.sampling_params import SamplingParamsError

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""The status that metrics and logs give a request whose client left. It is never sent."""
RETRY_SOON_S = 1.0
"""Retry-After while the cluster starts, drains or replaces a replica."""
TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


class ApiError(Exception):
    """An answer that is an error.

    param: the field that is at fault, as the client wrote it
    retry_after_s: when to come back; None: no Retry-After header
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = headers or {}

    def body(self) -> dict[str, object]:
        """Give the answer's body."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Give the whole answer."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            # Whole seconds, and never 0: that reads as "at once".
            headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        content = msgspec.json.encode(self.body())
        return Response(content, status_code=self.status, headers=headers, media_type="application/json")


class ClientGoneError(Exception):
    """The client closed the connection. Nothing can be answered."""


def invalid(param: str | None, problem: str) -> ApiError:
    """Make the 400 that names a field."""
    return ApiError(400, f"{param}: {problem}" if param else problem, param=param, code="invalid_value")


def to_api_error(error: Exception) -> ApiError:
    """Say what a client is told of `error`. A bug is logged here with its traceback, and is a 500."""
    match error:
        case ApiError():
            return error
        case SamplingParamsError():
            return invalid(error.field, error.problem)
        case InvalidRequestError():
            return ApiError(400, error.message, param=error.field, code="invalid_value")
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
        case NoReplicaError():
            return ApiError(503, str(error), code="no_replica", retry_after_s=error.retry_after_s)
        case PoisonousRequestError():
            return ApiError(500, str(error), code="poisonous_request")
        case ReplicaLostError():
            return ApiError(503, str(error), code="replica_lost", retry_after_s=RETRY_SOON_S)
        case RequestTimeoutError():
            return ApiError(408, str(error), code="timeout")
        case RequestAbortedError():
            return ApiError(503, str(error), code="server_stopping", retry_after_s=RETRY_SOON_S)
        case ServingError():
            log.error("request failed: %s", error)
            return ApiError(500, str(error), code="engine_error")
        case _:
            log.error("request failed", exc_info=error)
            return ApiError(500, "internal error", code="internal_error")
