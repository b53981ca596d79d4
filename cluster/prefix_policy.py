"""prefix_aware: the replica on which a request costs least, counted in tokens of prefill. Pure.

Called by: Balancer. All terms are expected times divided by the time of one prefill token; the weights are the
`StepCost` that the replicas' own steps show (step_cost.py). For a prompt of L tokens, of which a replica holds H, with
Q tokens queued there, n requests, C tokens of context, steps of at most B tokens, and E output tokens a request:

    step    = (base + n * d + C * c) / p      what a step costs beside its prefill, in prefill tokens
    own     = (Q + L - H) * (1 + step / B)    until its first token: those before it, and its own prompt
    others  = (L - H) * mean n                every token that is computed holds up all requests of its replica
    room    = steps until enough blocks are free, when the prompt does not fit now; each costs `step`

`others` counts with the mean over all replicas, for it is the price of work that a hit saves, not a load: prompts that
hit nothing go by load alone. At an idle replica there are no others. So affinity never beats an idle replica by more
than the prefill that it saves. It cannot pile up either: a replica that has more queued than `BOUND` times the
mean, and beyond that more than the request saves there, or one step takes away, is passed over while another has not;
and so is one whose steps take more than `BOUND` times the mean, with which everybody's tokens come.
"""

from collections.abc import Sequence
from operator import attrgetter

from .load_book import ReplicaLoad
from .routing import Decision, RoutingReason, RoutingRequest
from .step_cost import StepCost

BOUND = 1.25
"""How much more work than the mean a replica may have, as with consistent hashing with bounded loads."""

_queued = attrgetter("prefill_tokens")


class PrefixAware:
    """The default policy. Owner: Balancer.

    max_num_batched_tokens: of a step, as the engine cores are told
    turn: where the scan starts at first
    """

    def __init__(self, *, max_num_batched_tokens: int, turn: int = 0) -> None:
        self._budget = max_num_batched_tokens
        self._turn = turn

    def choose(
        self,
        request: RoutingRequest,
        loads: Sequence[ReplicaLoad],
        cost: StepCost,
        mean_output_tokens: float,
    ) -> Decision:
        """Return the cheapest replica of `loads`, which is not empty. O(replicas)."""
        base = cost.base_s / cost.prefill_token_s
        decode = cost.decode_token_s / cost.prefill_token_s
        context = cost.context_token_s / cost.prefill_token_s
        prompt, budget, hits = request.num_prompt_tokens, self._budget, request.num_cached_tokens
        others = sum([load.num_requests for load in loads]) / len(loads)
        scores: dict[int, float] = {}
        steps: list[float] = []
        total_queued, lowest = 0.0, float("inf")
        start = self._turn % len(loads)
        self._turn += 1
        # Among equals the first one wins: the scan begins one further each time.
        order = [*loads[start:], *loads[:start]]
        best_index = 0
        for index, load in enumerate(order):
            dp_rank, num_requests, queued = load.dp_rank, load.num_requests, load.prefill_tokens
            missing = prompt - hits[dp_rank] if dp_rank in hits else prompt
            step = base + num_requests * decode + load.running_tokens * context
            score = (queued + missing) * (1.0 + step / budget)
            if num_requests:
                score += others * missing
                shortage = missing - load.headroom_tokens
                if shortage > 0:
                    # Blocks come back as requests end: in each step one in E, with its share of the context.
                    score += shortage * mean_output_tokens / (load.running_tokens + 1.0) * step
            scores[dp_rank] = score
            steps.append(step)
            total_queued += queued
            if score < lowest:
                lowest, best_index = score, index
        best_load = order[best_index]
        reason = RoutingReason.LOAD
        saved = hits.get(best_load.dp_rank, 0)
        most = BOUND * total_queued / len(order) + max(budget, saved)
        longest = BOUND * sum(steps) / len(order)
        if best_load.prefill_tokens > most or steps[best_index] > longest:
            below = [
                load
                for load, step in zip(order, steps, strict=True)
                if load.prefill_tokens <= most and step <= longest
            ]
            if below:
                best_load = min(below, key=lambda load: scores[load.dp_rank])
                reason = RoutingReason.BOUND
        if saved and reason is RoutingReason.LOAD:
            idlest = min(order, key=_queued)
            if saved > hits.get(idlest.dp_rank, 0):
                reason = RoutingReason.PREFIX
        dp_rank = best_load.dp_rank
        return Decision(dp_rank=dp_rank, reason=reason, scores=scores, num_cached_tokens=hits.get(dp_rank, 0))
