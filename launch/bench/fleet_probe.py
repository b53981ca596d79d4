"""Whether a cluster that is being hurt is whole again, asked over HTTP and seen in the process list.

Called by: failover.py and torture.py, on the event loop of the benchmark.
"""

import asyncio
import time

import msgspec

from .errors import BenchError
from .http_client import HttpClient
from .launched_cluster import LaunchedCluster

_ASK_EVERY_S = 0.02
_ASK_TIMEOUT_S = 5.0


class _Ready(msgspec.Struct, frozen=True):
    replicas_ready: int = 0
    replicas: int = 0


class FleetProbe:
    """Asks `/ready`. Its connections are its own."""

    def __init__(self, cluster: LaunchedCluster) -> None:
        self._cluster = cluster
        self._http = HttpClient(cluster.url, {})
        self._roles = set(cluster.pids())
        self.num_replicas = sum(role.startswith("dp") and " " not in role for role in self._roles)

    async def num_ready(self) -> int:
        """Return how many replicas serve; 0 when no API server answers. Raises BenchError when the cluster is gone."""
        if not self._cluster.is_running:
            raise BenchError(f"the cluster has ended: {self._cluster.said()[-2000:]}")
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                response = await self._http.send("GET", "/ready")
                try:
                    return msgspec.json.decode(await response.read(), type=_Ready).replicas_ready
                finally:
                    response.close()
        except (OSError, TimeoutError, msgspec.MsgspecError):
            return 0

    async def is_whole(self) -> bool:
        """Return whether all replicas serve and all processes are there. Raises BenchError."""
        return await self.num_ready() == self.num_replicas and self._has_all()

    async def wait_hurt(self, timeout_s: float) -> None:
        """Wait until fewer replicas serve than there are. Raises BenchError."""
        await self._wait(False, timeout_s)

    async def wait_whole(self, timeout_s: float) -> float:
        """Wait until all replicas serve and all processes are there; return the instant. Raises BenchError."""
        await self._wait(True, timeout_s)
        return time.perf_counter()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _wait(self, is_whole: bool, timeout_s: float) -> None:
        deadline = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline:
            if await self.is_whole() == is_whole:
                return
            await asyncio.sleep(_ASK_EVERY_S)
        raise BenchError(f"the cluster was not {'whole' if is_whole else 'hurt'} within {timeout_s:g} s")

    def _has_all(self) -> bool:
        return self._roles <= set(self._cluster.pids())
