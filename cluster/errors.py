"""Errors of the cluster: what a front end meets when it looks for a replica."""

from ..engine.errors import RequestError


class NoReplicaError(RequestError):
    """No replica serves at the moment. `retry_after_s`: when to come back."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__("no replica is ready to serve")
        self.retry_after_s = retry_after_s
