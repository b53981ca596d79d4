"""The headers of routing: what a client may ask of it, and what it is told.

Called by: routes.py.

    X-Phalanx-Replica: 1         in a request: this replica and no other; in an answer: those that computed it
    X-Session-Id: abc            in a request: where sessions are sticky, its requests stay together; else `user` counts
    X-Phalanx-Explain: 1         in a request: say why; in the answer then
    X-Phalanx-Routing-Reason     one reason for each prompt (cluster/routing.py)
    X-Phalanx-Routing-Scores     the score of each replica that was compared, in the policy's unit; the lowest wins
"""

from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from ...cluster.routing import scores_text
from ...engine.input_processor import RequestOptions
from .errors import invalid
from .service import Service

REPLICA = "X-Phalanx-Replica"
SESSION = "X-Session-Id"
EXPLAIN = "X-Phalanx-Explain"
REASON = "X-Phalanx-Routing-Reason"
SCORES = "X-Phalanx-Routing-Scores"
MAX_SESSION_CHARACTERS = 256


def with_routing(options: RequestOptions, request: Request, user: str | None) -> RequestOptions:
    """Add what the client asks of the routing. Raises ApiError 400."""
    dp_rank: int | None = None
    if (asked := request.headers.get(REPLICA)) is not None:
        if not (asked.isascii() and asked.isdecimal() and len(asked) <= 6):
            raise invalid(REPLICA, "must be the number of a replica")
        dp_rank = int(asked)
    session_id = request.headers.get(SESSION) or user or None
    if session_id is not None and len(session_id) > MAX_SESSION_CHARACTERS:
        raise invalid(SESSION if SESSION in request.headers else "user", "has too many characters")
    return replace(options, dp_rank=dp_rank, session_id=session_id)


def explain(service: Service, request: Request, request_ids: Sequence[str], response: Response) -> Response:
    """Write into the answer's headers which replicas its prompts went to, and on request why. Returns `response`."""
    decisions = [service.cluster.decision(request_id) for request_id in request_ids]
    known = [decision for decision in decisions if decision is not None]
    if known:
        response.headers[REPLICA] = ", ".join(map(str, sorted({decision.dp_rank for decision in known})))
        if request.headers.get(EXPLAIN, "").strip().lower() in ("1", "true"):
            response.headers[REASON] = ", ".join(decision.reason for decision in known)
            if scores := "; ".join(scores_text(decision.scores) for decision in known if decision.scores):
                response.headers[SCORES] = scores
    return response
