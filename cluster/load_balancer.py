"""Which replica takes the next request. Pure: decides on what it is given, keeps only where it stopped.

Called by: DpClient, in each front end, once per request.
"""

from collections.abc import Mapping, Sequence

from ..engine.messages import EngineStats
from .errors import NoReplicaError


class LeastLoadedBalancer:
    """Choose the replica with the fewest requests; among equals take turns.

    A replica's load is the larger of two counts: the requests that this front end has there and that have not
    finished (exact, at once), and waiting plus running as last published (all front ends, a little old).
    """

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, ready: Sequence[int], inflight: Mapping[int, int], stats: Mapping[int, EngineStats]
    ) -> int:
        """Return the dp_rank of the least loaded of `ready`. Raises NoReplicaError when there is none."""
        if not ready:
            raise NoReplicaError()

        def load(dp_rank: int) -> int:
            known = stats.get(dp_rank)
            published = known.num_waiting + known.num_running if known is not None else 0
            return max(inflight.get(dp_rank, 0), published)

        # Without turns, all front ends would send their first requests to the same replica.
        start = self._turn % len(ready)
        choice = min([*ready[start:], *ready[:start]], key=load)
        self._turn += 1
        return choice
