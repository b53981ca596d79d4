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

from collections.abc import Mapping, Sequence

from .load_book import ReplicaLoad
from .routing import Decision, RoutingReason, RoutingRequest, rotated
from .step_cost import StepCost

BOUND = 1.25
"""How much more work than the mean a replica may have, as with consistent hashing with bounded loads."""


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
        steps: dict[int, float] = {}
        for load in loads:
            dp_rank, num_requests = load.dp_rank, load.num_requests
            missing = prompt - hits[dp_rank] if dp_rank in hits else prompt
            step = base + num_requests * decode + load.running_tokens * context
            steps[dp_rank] = step
            score = (load.prefill_tokens + missing) * (1.0 + step / budget)
            if num_requests:
                score += others * missing
                shortage = missing - load.headroom_tokens
                if shortage > 0:
                    # Blocks come back as requests end: in each step one in E, with its share of the context.
                    score += shortage * mean_output_tokens / (load.running_tokens + 1.0) * step
            scores[dp_rank] = score
        order = loads if len(loads) == 1 else [loads[index] for index in rotated(len(loads), self._turn)]
        self._turn += 1
        best = min(order, key=lambda load: scores[load.dp_rank])
        bounded = self._below_bound(best, order, steps, hits.get(best.dp_rank, 0))
        is_bound = bounded is not order
        if is_bound:
            best = min(bounded, key=lambda load: scores[load.dp_rank])
        reason = RoutingReason.BOUND if is_bound else RoutingReason.LOAD
        if hits and not is_bound:
            idlest = min(order, key=lambda load: load.prefill_tokens)
            if hits.get(best.dp_rank, 0) > hits.get(idlest.dp_rank, 0):
                reason = RoutingReason.PREFIX
        return Decision(
            dp_rank=best.dp_rank,
            reason=reason,
            scores=scores,
            num_cached_tokens=hits.get(best.dp_rank, 0),
        )

    def _below_bound(
        self,
        best: ReplicaLoad,
        order: Sequence[ReplicaLoad],
        steps: Mapping[int, float],
        num_saved: int,
    ) -> Sequence[ReplicaLoad]:
        """Return the replicas that may take a request: all of them unless `best` has too much queued already."""
        most = BOUND * sum([load.prefill_tokens for load in order]) / len(order) + max(
            self._budget, num_saved
        )
        longest = BOUND * sum(steps.values()) / len(order)
        if best.prefill_tokens <= most and steps[best.dp_rank] <= longest:
            return order
        below = [load for load in order if load.prefill_tokens <= most and steps[load.dp_rank] <= longest]
        return below or order
