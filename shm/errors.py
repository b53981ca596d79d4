"""The tree of errors. The branch says what the handler must do.

    ServingError
      ConfigError                 before anything starts; names the field        -> exit code 2
      RequestError                one request fails, the engine goes on
        InvalidRequestError         the client's fault; names the field          -> 400 (404: unknown model)
        QueueFullError              come back later                              -> 429
        RequestAbortedError         the client left, or the server stops         -> 499 / 503
        RequestTimeoutError         not finished in the time it was given        -> 408
        NoReplicaError              no replica serves at the moment              -> 503, may be tried again
        ReplicaLostError            its replica died with it                     -> 503, may be tried again
        PoisonousRequestError       it killed two replicas in a row              -> 500, not tried again
      TransportError              a ring, a queue or a socket
        QueueClosedError            the other side is gone, or closed it
        QueueEmptyError             nothing there, and the caller did not want to wait
        RingFullError               no room, and the caller did not want to wait
        QueueTimeoutError           the deadline passed
        CallCancelledError          the caller gave the call up itself
        MessageTooLargeError        more than one record may hold
        ProtocolError               a frame that must not come now
        CollectiveError             a rank that others wait for is gone, late, or elsewhere
      ProcessError                a process that we started; fields: role, rank, exitcode, detail
        StartupError                it never became ready                        -> do not restart
        ProcessDiedError            it was ready, and is gone                    -> supervision decides
        ProcessHungError            no progress within its budget                -> supervision decides
        WorkerCallError             a call failed on a rank that lives on; carries the remote traceback

`ServingError`, `TransportError` and `ProcessError` live here, on the lowest floor, so that every folder
can derive from them. `RequestError` and its children: engine/errors.py; NoReplicaError: cluster/errors.py.
"""


class ServingError(Exception):
    """Root of all errors of this project."""


class ConfigError(ServingError):
    """A setting is wrong. Raised before anything starts; ends the program with exit code 2.

    field: dotted path of the setting as the user writes it ("parallel.tensor_parallel_size").
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class TransportError(ServingError):
    """A ring, a queue or a socket could not do what was asked."""


class QueueClosedError(TransportError):
    """The other side closed the queue or died."""


class QueueEmptyError(TransportError):
    """Nothing to read, and the caller did not want to wait."""


class RingFullError(TransportError):
    """No room to write, and the caller did not want to wait."""


class QueueTimeoutError(TransportError):
    """The deadline passed. `str()` says who was waited for."""


class CallCancelledError(TransportError):
    """The answer was given up by who asked for it. The call itself has run, or will."""


class MessageTooLargeError(TransportError):
    """A record is larger than the ring takes.

    num_bytes, max_bytes: what was asked, what is allowed.
    """

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"a record of {num_bytes} bytes is larger than the limit of {max_bytes} bytes")
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes


class ProtocolError(TransportError):
    """A frame that cannot be decoded, or that must not come now."""


class CollectiveError(TransportError):
    """The ranks of a replica cannot finish what they do together. `str()` names the rank and the collective."""


class ProcessError(ServingError):
    """Something about a process that we started.

    role:     its name as in the log prefix and the process title ("dp1 tp3")
    rank:     tp_rank for workers, dp_rank for engine cores, else None
    exitcode: as `subprocess` gives it (negative: signal), None while it lives
    detail:   what is known beyond that: the last phase, a remote traceback
    """

    def __init__(
        self, role: str, *, rank: int | None = None, exitcode: int | None = None, detail: str = ""
    ) -> None:
        super().__init__(role)
        self.role = role
        self.rank = rank
        self.exitcode = exitcode
        self.detail = detail

    def _sentence(self, what: str) -> str:
        return f"{self.role} {what}" + (f": {self.detail}" if self.detail else "")

    def __str__(self) -> str:
        return self._sentence("failed")


class StartupError(ProcessError):
    """A child never became ready. Such a child is not restarted."""

    def __str__(self) -> str:
        # An exit code of its own says no more than what it said itself; a signal came from elsewhere.
        is_killed = self.exitcode is not None and self.exitcode < 0
        return self._sentence("did not start" + (f", {describe_exit(self.exitcode)}" if is_killed else ""))


class ProcessDiedError(ProcessError):
    """A child that was ready is gone."""

    def __str__(self) -> str:
        return self._sentence(describe_exit(self.exitcode))


class ProcessHungError(ProcessError):
    """A child made no progress within its budget, and was killed by us."""

    def __str__(self) -> str:
        return self._sentence("made no progress within its budget")


class WorkerCallError(ProcessError):
    """A call failed on one rank, and the process lives on. `detail` is the remote traceback."""

    def __str__(self) -> str:
        return self._sentence("failed in a call")


def describe_exit(exitcode: int | None) -> str:
    """Say an exit code in words: "was killed by signal 9 (out of memory?)", "exited with status 3"."""
    if exitcode is None:
        return "is gone"
    if exitcode == -9:
        return "was killed by signal 9 (out of memory?)"
    if exitcode < 0:
        return f"was killed by signal {-exitcode}"
    return f"exited with status {exitcode}"
