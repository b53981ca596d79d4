"""The application: routes, keys, error boundary and metrics.

Called by: process.py with the real engine, tests with a small one. Nothing that a client sends gets an answer
outside OpenAI's shape, and nothing but a bug of ours gets a 500.
"""

import hmac
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ... import __version__
from ..metrics import CONTENT_TYPE
from . import health, model_routes, routes
from .admin import ADMIN_ROUTES
from .errors import CLIENT_GONE, ApiError, ClientGoneError, to_api_error
from .routing_headers import explain
from .service import Service
from .sse import STATUS_KEY

Handler = Callable[[Service, Request], Awaitable[Response]]

GUARDED_PREFIXES = ("/v1/", "/tokenize", "/detokenize")
"""Where a key is asked for, when there is one. Health and metrics are for machines of the operator."""
ADMIN_PREFIX = "/admin/"
"""Where the administrator's key is asked for. Without one nobody enters."""


def create_app(service: Service) -> Starlette:
    """Build the application around `service`. Starts nothing."""
    routing_table = []

    def add(method: str, path: str, handler: Handler) -> None:
        async def endpoint(request: Request) -> Response:
            return await _guard(service, handler, request)

        routing_table.append(Route(path, endpoint, methods=[method]))

    add("POST", "/v1/completions", routes.create_completion)
    add("POST", "/v1/chat/completions", routes.create_chat_completion)
    add("GET", "/v1/models", model_routes.list_models)
    add("GET", "/v1/models/{model_id:path}", model_routes.get_model)
    add("POST", "/tokenize", routes.tokenize)
    add("POST", "/detokenize", routes.detokenize)
    add("GET", "/health", health.health)
    add("GET", "/ready", health.ready)
    add("GET", "/health/progress", health.progress)
    add("GET", "/cluster", health.cluster)
    add("GET", "/metrics", metrics)
    add("GET", "/version", version)
    for path, handler in ADMIN_ROUTES.items():
        add("POST", path, handler)
    app = Starlette(
        routes=routing_table,
        middleware=[Middleware(FrontDoor, service=service)],
        exception_handlers={HTTPException: _on_http_exception},
    )
    # A redirect from "/v1/models/" would name the host that the client named, and send its key there without TLS.
    app.router.redirect_slashes = False
    return app


async def metrics(service: Service, request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def version(service: Service, request: Request) -> Response:
    """GET /version."""
    return routes.json_response({"version": __version__})


class FrontDoor:
    """Asks for the keys, and counts every answer and every stream until its end."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._key = None if service.api_key is None else service.api_key.encode()
        self._admin_key = None if service.admin_key is None else service.admin_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._service.gate.inside():
            refusal = self._refusal(scope)
            if refusal is None:
                await self._app(scope, receive, send_and_note)
            else:
                await refusal.response()(scope, receive, send_and_note)
        self._service.metrics.count_request(scope["path"], scope.get(STATUS_KEY, status))

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Say why a request may not enter; None when it may."""
        if scope["path"].startswith(ADMIN_PREFIX):
            if self._admin_key is None:
                return ApiError(403, "this server has no administrator's key", code="no_admin_key")
            return None if _has_key(scope, self._admin_key) else _wrong_key("administrator's key")
        is_open = scope["method"] == "OPTIONS" or not scope["path"].startswith(GUARDED_PREFIXES)
        if self._key is None or is_open or _has_key(scope, self._key):
            return None
        return _wrong_key("API key")


def _has_key(scope: Scope, expected: bytes) -> bool:
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = header.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), expected)


def _wrong_key(name: str) -> ApiError:
    return ApiError(
        401,
        f"the {name} is missing or wrong",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


async def _guard(service: Service, handler: Handler, request: Request) -> Response:
    try:
        response = await handler(service, request)
        return explain(service, request, getattr(request.state, "request_ids", ()), response)
    except ClientGoneError:
        request.scope[STATUS_KEY] = CLIENT_GONE
        return Response(status_code=CLIENT_GONE)
    # The per-request boundary: whatever went wrong fails this request only.
    except Exception as error:
        return to_api_error(error).response()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # Not request.url: that one is made of the client's Host header too.
    messages = {
        404: f"there is no route {request.scope['path']}",
        405: f"{request.method} is not allowed here",
    }
    message = messages.get(error.status_code, str(error.detail))
    codes = {404: "route_not_found", 405: "method_not_allowed"}
    headers = dict(error.headers or {})
    return ApiError(error.status_code, message, code=codes.get(error.status_code), headers=headers).response()
