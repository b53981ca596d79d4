"""ClusterLink: what this API server knows of the cluster, and its way to the supervisor.

Called by: process.py feeds it what comes down the lifeline; the routes read it, and send commands through it. Thread:
the event loop. When the supervisor dies, this process ends with it; nobody waits here for ever.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

import msgspec

from ...cluster.messages import (
    AdminCommand,
    AdminKind,
    AdminResult,
    BlamedRequests,
    FleetApplied,
    FleetUpdate,
    FromFrontEnd,
    ToFrontEnd,
)
from ...workers.sleep import SleepLevel


class ClusterPort(Protocol):
    """What the routes see of it; `ClusterLink` in serving."""

    @property
    def fleet(self) -> FleetUpdate | None:
        """The supervisor's newest word; None until the first."""
        ...

    async def command(
        self,
        kind: AdminKind,
        *,
        dp_rank: int | None = None,
        path: str | None = None,
        version: str | None = None,
        level: SleepLevel = SleepLevel.HOST,
        data_parallel_size: int | None = None,
        timeout_s: float | None = None,
    ) -> AdminResult:
        """Have the supervisor carry out a command; wait for its end. See AdminCommand."""
        ...


class ClusterLink:
    """See above.

    send:  to the supervisor
    apply: has requests move as an update wants it, before the supervisor is told that they have
    learn: takes the fingerprints of requests that other front ends found to kill replicas
    """

    def __init__(
        self,
        send: Callable[[bytes], None],
        apply: Callable[[FleetUpdate], None],
        learn: Callable[[list[bytes]], None] = lambda fingerprints: None,
    ) -> None:
        self.fleet: FleetUpdate | None = None
        self._send = send
        self._apply = apply
        self._learn = learn
        self._command_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[AdminResult]] = {}

    def take(self, message: ToFrontEnd) -> None:
        """Take what the supervisor says."""
        match message:
            case FleetUpdate():
                self.fleet = message
                self._apply(message)
                self._tell(FleetApplied(sequence=message.sequence))
            case BlamedRequests():
                self._learn(message.fingerprints)
            case AdminResult():
                future = self._waiting.get(message.command_id)
                if future is not None and not future.done():
                    future.set_result(message)

    def tell_blamed(self, fingerprints: list[bytes]) -> None:
        """Have the other front ends told of requests that kill replicas."""
        self._tell(BlamedRequests(fingerprints=fingerprints))

    async def command(
        self,
        kind: AdminKind,
        *,
        dp_rank: int | None = None,
        path: str | None = None,
        version: str | None = None,
        level: SleepLevel = SleepLevel.HOST,
        data_parallel_size: int | None = None,
        timeout_s: float | None = None,
    ) -> AdminResult:
        """See ClusterPort. A caller that is cancelled gives up the result, not the command."""
        command = AdminCommand(
            command_id=next(self._command_ids),
            kind=kind,
            dp_rank=dp_rank,
            path=path,
            version=version,
            level=level,
            data_parallel_size=data_parallel_size,
            timeout_s=timeout_s,
        )
        future: asyncio.Future[AdminResult] = asyncio.get_running_loop().create_future()
        self._waiting[command.command_id] = future
        try:
            self._tell(command)
            return await future
        finally:
            del self._waiting[command.command_id]

    def _tell(self, message: FromFrontEnd) -> None:
        self._send(msgspec.msgpack.encode(message))
