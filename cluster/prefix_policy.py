"""prefix_aware: the replica on which a request costs least, counted in tokens of prefill. Pure.

Called by: Balancer. All terms are expected times divided by the time of one prefill token; the weights are the
`StepCost` that the replicas' own steps show (step_cost.py). For a prompt of L tokens, of which a replica holds H, with
Q tokens queued there, n requests, C tokens of context, steps of at most B tokens, and E output tokens a request:

    step    = (base + n * d + C * c) / p      what a step costs beside its prefill, in prefill tokens
    own     = (Q + L - H) * (1 + step / B)    until its first token: those before it, and its own prompt
    others  = (L - H) * mean Q / B            every token that is computed holds up those that wait: one for each
                                              step's worth of tokens that is queued, on average over the replicas
    room    = steps until enough blocks are free, when the prompt does not fit now; each costs `step`

`others` is the price of work that a hit saves: the same at every replica, and nothing while nothing is queued, so that
prefixes spread when there is time to compute them twice, and stay together when there is not. Prompts that hit nothing
go by load alone. At an idle replica there are no others. So affinity never beats an idle replica by more
than the prefill that it saves. It cannot pile up either: a replica that has more queued than `BOUND` times the
mean, and beyond that more than the request saves there, or one step takes away, is passed over while another has not;
and so is one whose steps, with which everybody's tokens come, take more than `BOUND` times the mean, and beyond that
more than the request itself adds to a step: where one request runs, there is room for a second.
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
        num_replicas = len(loads)
        mean_queued = sum([load.prefill_tokens for load in loads]) / num_replicas
        others, step_part = mean_queued / budget, 1.0 / budget
        start = self._turn % num_replicas
        self._turn += 1
        # Among equals the first one wins: the scan begins one further each time.
        order = [*loads[start:], *loads[:start]] if start else loads
        ranks = [load.dp_rank for load in order]
        steps: list[float] = []
        scores: list[float] = []
        for load in order:
            num_requests = load.num_requests
            step = base + num_requests * decode + load.running_tokens * context
            missing = prompt - hits[load.dp_rank] if load.dp_rank in hits else prompt
            score = (load.prefill_tokens + missing) * (1.0 + step * step_part)
            if num_requests:
                score += others * missing
                if missing > load.headroom_tokens:
                    # Blocks come back as requests end: in each step one in E, with its share of the context.
                    shortage = missing - load.headroom_tokens
                    score += shortage * mean_output_tokens / (load.running_tokens + 1.0) * step
            steps.append(step)
            scores.append(score)
        best = scores.index(min(scores))
        reason = RoutingReason.LOAD
        saved = hits.get(ranks[best], 0)
        most = BOUND * mean_queued + max(budget, saved)
        longest = BOUND * sum(steps) / num_replicas + decode + prompt * context
        if order[best].prefill_tokens > most or steps[best] > longest:
            below = [
                index
                for index, load in enumerate(order)
                if load.prefill_tokens <= most and steps[index] <= longest
            ]
            if below:
                best = min(below, key=scores.__getitem__)
                reason = RoutingReason.BOUND
        if saved and reason is RoutingReason.LOAD:
            idlest = min(order, key=_queued)
            if saved > hits.get(idlest.dp_rank, 0):
                reason = RoutingReason.PREFIX
        return Decision(
            dp_rank=ranks[best],
            reason=reason,
            scores=dict(zip(ranks, scores, strict=True)),
            num_cached_tokens=hits.get(ranks[best], 0),
        )
