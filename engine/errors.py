"""Errors of one request: the engine goes on. See the tree in shm/errors.py."""

from ..shm.errors import ServingError


class RequestError(ServingError):
    """One request failed."""


class InvalidRequestError(RequestError):
    """The client's fault.

    field: name of the parameter as the client wrote it ("max_tokens"), None when no single one is at fault.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class QueueFullError(RequestError):
    """Too many requests wait already. `retry_after_s`: when to come back."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"too many requests are waiting; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class RequestAbortedError(RequestError):
    """The client left, or the server is stopping."""


class ReplicaLostError(RequestError):
    """The replica that computed the request died. The request may be tried again."""


class RequestTimeoutError(RequestError):
    """The request's deadline has passed."""


class PoisonousRequestError(RequestError):
    """An equal request has killed two replicas in a row; it is not tried again."""

    def __init__(self) -> None:
        super().__init__("an equal request has killed two replicas in a row; it will not be tried again")
