"""Which replica takes the next request. Pure: decides on what it is given, keeps only whose turn it is.

Called by: DpClient, in each front end, once per request; and by the routing benchmark.

    prefix_aware   least expected cost in tokens, prefix hits counted (prefix_policy.py); the default
    kv_aware       max(clients * inflight, waiting + running) + 6 * waiting * max(0, kv - 0.5)
    least_loaded   fewest requests
    power_of_two   the one of two drawn at random that has fewer requests
    round_robin    one after the other

Among equals the scan starts one further at each decision. Only replicas that are ready are ever given.
"""

import random
from collections.abc import Callable, Mapping, Sequence

from .errors import NoReplicaError
from .load_book import ReplicaLoad
from .prefix_policy import PrefixAware
from .routing import Decision, RoutingPolicy, RoutingReason, RoutingRequest, rotated
from .step_cost import StepCost

KV_PENALTY = 6.0
KV_THRESHOLD = 0.5


class Balancer:
    """One policy with its turn. Owner: one front end.

    client_index, num_clients: of this front end: they begin their turns at different replicas
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        *,
        max_num_batched_tokens: int,
        client_index: int = 0,
        num_clients: int = 1,
    ) -> None:
        self.policy = policy
        self._num_clients = num_clients
        self._turn = client_index
        self._random = random.Random(client_index)
        self._prefix_aware = PrefixAware(max_num_batched_tokens=max_num_batched_tokens, turn=client_index)

    def choose(
        self,
        request: RoutingRequest,
        loads: Sequence[ReplicaLoad],
        cost: StepCost,
        mean_output_tokens: float,
    ) -> Decision:
        """Choose one of `loads`, the replicas that are ready.

        cost, mean_output_tokens: what a step costs, and how many of them a request takes
        Raises NoReplicaError when there is none.
        """
        if not loads:
            raise NoReplicaError()
        if len(loads) == 1:
            dp_rank = loads[0].dp_rank
            num_cached_tokens = request.num_cached_tokens.get(dp_rank, 0)
            return Decision(
                dp_rank=dp_rank, reason=RoutingReason.ONLY, scores={}, num_cached_tokens=num_cached_tokens
            )
        match self.policy:
            case RoutingPolicy.PREFIX_AWARE:
                return self._prefix_aware.choose(request, loads, cost, mean_output_tokens)
            case RoutingPolicy.KV_AWARE:
                return self._lowest(request, loads, self._kv_score)
            case RoutingPolicy.LEAST_LOADED:
                return self._lowest(request, loads, _num_requests)
            case RoutingPolicy.POWER_OF_TWO:
                return self._lowest(request, self._random.sample(loads, 2), _num_requests)
            case RoutingPolicy.ROUND_ROBIN:
                load = loads[self._turn % len(loads)]
                self._turn += 1
                return _decide(request, load.dp_rank, RoutingReason.TURN, {})

    def _lowest(
        self, request: RoutingRequest, loads: Sequence[ReplicaLoad], score: Callable[[ReplicaLoad], float]
    ) -> Decision:
        scores = {load.dp_rank: score(load) for load in loads}
        order = [loads[index].dp_rank for index in rotated(len(loads), self._turn)]
        self._turn += 1
        return _decide(request, min(order, key=scores.__getitem__), RoutingReason.LOAD, scores)

    def _kv_score(self, load: ReplicaLoad) -> float:
        base = max(self._num_clients * load.num_own, load.reported_requests)
        return base + KV_PENALTY * load.reported_waiting * max(0.0, load.kv_usage - KV_THRESHOLD)


def _num_requests(load: ReplicaLoad) -> float:
    return load.num_requests


def _decide(
    request: RoutingRequest, dp_rank: int, reason: RoutingReason, scores: Mapping[int, float]
) -> Decision:
    return Decision(
        dp_rank=dp_rank,
        reason=reason,
        scores=scores,
        num_cached_tokens=request.num_cached_tokens.get(dp_rank, 0),
    )
