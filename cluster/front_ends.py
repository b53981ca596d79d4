"""FrontEnds: the supervisor's dealings with the API servers, of which there may be several.

Called by: the supervisor, in its main thread. All of them are told the same. What an update asks for is done when each
that serves has done it; what an operator wishes may come through any of them, and is answered there; what one has
learnt of requests that kill replicas, all know, those that are started later included.

When a front end dies: its replicas drop what they compute for it, at once and not only when its successor says hello;
nobody waits for its word any more, and the result of what it asked stands in the log only.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from ..engine.core_control import FrontEndGone
from ..shm.errors import QueueClosedError
from ..shm.number_table import NumberTable
from ..shm.process import ChildProcess
from .fleet import client_index_of, kind_of
from .messages import AdminCommand, AdminResult, BlamedRequests, FleetUpdate, ToFrontEnd
from .supervision import Supervision
from .supervision_events import ChildKind, ChildState
from .suspects import MAX_FINGERPRINTS


class _Asker(NamedTuple):
    """Who brought a command, and what it calls it."""

    role: str
    epoch: int
    command_id: int


class FrontEnds:
    """See above.

    children: by role, kept up to date by their owner
    table:    what front ends tell each other; see front_end_board.py. Closed by its owner
    """

    def __init__(
        self, supervision: Supervision, children: Mapping[str, ChildProcess], table: NumberTable
    ) -> None:
        self._supervision = supervision
        self._table = table
        self._children = children
        self._applied: dict[str, int] = {}
        self._askers: dict[int, _Asker] = {}
        self._num_commands = 0
        self._blamed: OrderedDict[bytes, None] = OrderedDict()

    @property
    def has_any(self) -> bool:
        """True when somebody will answer an update."""
        return bool(self._roles(ChildKind.API_SERVER, ChildState.READY))

    @property
    def applied_by_all(self) -> int | None:
        """The number of the last update that each front end that serves has carried out; None: none serves."""
        numbers = (
            self._applied.get(role, -1) for role in self._roles(ChildKind.API_SERVER, ChildState.READY)
        )
        return min(numbers, default=None)

    def started(self, role: str, update: FleetUpdate) -> None:
        """A front end has a new process: tell it what the others know, before it takes its first request."""
        self._send(role, update)
        if self._blamed:
            self._send(role, BlamedRequests(fingerprints=list(self._blamed)))

    def gone(self, role: str, epoch: int) -> None:
        """The process of a front end has ended. Call it when Supervision knows. epoch: of that process"""
        self._applied.pop(role, None)
        # Nobody shall wait for its trials, count its requests twice, or leave connections to it.
        self._table.clear(client_index_of(role))
        word = FrontEndGone(client_index=client_index_of(role), incarnation=epoch)
        for core in self._roles(ChildKind.ENGINE_CORE, ChildState.READY):
            self._send(core, word)

    def applied(self, role: str, sequence: int) -> None:
        """A front end has carried out an update."""
        self._applied[role] = sequence

    def take(self, role: str, command: AdminCommand) -> AdminCommand:
        """Take a command of a front end; return it under a number that no other one has."""
        self._num_commands += 1
        self._askers[self._num_commands] = _Asker(role, self._supervision.epoch(role), command.command_id)
        return msgspec.structs.replace(command, command_id=self._num_commands)

    def answer(self, result: AdminResult) -> None:
        """Tell the front end that brought a command how it has ended, if it still lives."""
        asker = self._askers.pop(result.command_id)
        if self._supervision.epoch(asker.role) == asker.epoch:
            self._send(asker.role, msgspec.structs.replace(result, command_id=asker.command_id))

    def blame(self, role: str, fingerprints: Iterable[bytes]) -> None:
        """A front end has found out which requests kill replicas: tell the others."""
        news = [fingerprint for fingerprint in fingerprints if fingerprint not in self._blamed]
        self._blamed.update(dict.fromkeys(news))
        while len(self._blamed) > MAX_FINGERPRINTS:
            self._blamed.popitem(last=False)
        if news:
            for other in self._roles(ChildKind.API_SERVER, ChildState.STARTING, ChildState.READY):
                if other != role:
                    self._send(other, BlamedRequests(fingerprints=news))

    def tell_all(self, message: ToFrontEnd) -> None:
        """Send a message to each front end that has a process."""
        for role in self._roles(ChildKind.API_SERVER, ChildState.STARTING, ChildState.READY):
            self._send(role, message)

    def _roles(self, kind: ChildKind, *states: ChildState) -> list[str]:
        return [
            role
            for role in self._supervision.roles
            if kind_of(role) is kind and self._supervision.child_state(role) in states
        ]

    def _send(self, role: str, message: ToFrontEnd | FrontEndGone) -> None:
        # One that has just died is told apart by its exit, which is on its way.
        with contextlib.suppress(QueueClosedError):
            self._children[role].send(msgspec.msgpack.encode(message))
