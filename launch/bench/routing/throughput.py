"""How many requests a second a cluster takes while the first token comes soon enough, and how many it could. Pure.

Called by: the benchmark's command. A load begins with empty caches, and chats begin with their first turns, so what
comes in the warm-up only brings the cluster to where it stays; the requests of the window after it count. A rate is
what really came in the window: chats wait for their answers, and a slow cluster is asked less.

The bound is a cluster of one replica that is `dp` times as wide: it computes as many tokens a second as all replicas
together, in steps as long as theirs, and keeps in one cache what all of theirs could. It has no wrong place for a
request and computes nothing twice, so a policy that reaches it leaves nothing to gain.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from ..errors import BenchError
from ..stats import summarize
from .load import MADE_UP
from .measure import router_maker
from .simulation import Cluster, simulate

BOUND = "bound"
"""In place of a policy's name: one replica as wide as all of them."""
_PRECISION = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The requests that count arrive in window_s, after warmup_s; 99 % of them must have a token within slo_s."""

    slo_s: float
    warmup_s: float
    window_s: float


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate at which the p99 of TTFT was within slo_s. hit_rate: there, the warm-up included."""

    load: str
    policy: str
    seed: int
    slo_s: float
    requests_per_s: float
    ttft_p99_s: float
    hit_rate: float


def throughput_at(
    name: str, seed: int, policy: str, cluster: Cluster, window: Window, rate: float
) -> Throughput:
    """Search that rate, to 3 %. Raises BenchError when none is low enough.

    policy: or BOUND; rate: of the first try, in requests a second
    """
    found: Throughput | None = None

    def is_within(factor: float) -> bool:
        nonlocal found
        tried = _try(name, seed, policy, cluster, window, rate * factor)
        is_enough = tried.ttft_p99_s <= window.slo_s
        if is_enough and (found is None or tried.requests_per_s > found.requests_per_s):
            found = tried
        return is_enough

    low, high = _bracket(is_within)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_within(middle) else (low, middle)
    if found is None:
        raise BenchError(f"{name}, {policy}: the p99 of TTFT is above {window.slo_s} s at any rate")
    return found


def widen(cluster: Cluster) -> Cluster:
    """One replica as wide as all of a cluster's: as many tokens at a time, as much memory, steps as long."""
    dp, service = cluster.data_parallel_size, cluster.service
    cost = msgspec.structs.replace(
        service.cost,
        prefill_token_s=service.cost.prefill_token_s / dp,
        decode_token_s=service.cost.decode_token_s / dp,
        context_token_s=service.cost.context_token_s / dp,
    )
    wide = replace(
        service,
        cost=cost,
        capacity_tokens=dp * service.capacity_tokens,
        max_num_batched_tokens=dp * service.max_num_batched_tokens,
        max_num_seqs=dp * service.max_num_seqs,
    )
    return replace(cluster, data_parallel_size=1, service=wide, num_front_ends=1, snapshot_delay_s=0.0)


def _bracket(is_within: Callable[[float], bool]) -> tuple[float, float]:
    """Find a factor that is within and one that is not, one twice the other."""
    if is_within(1.0):
        low = 1.0
        while low < 64 and is_within(2 * low):
            low *= 2
        return low, 2 * low
    high = 1.0
    while high > 1 / 64 and not is_within(high / 2):
        high /= 2
    return high / 2, high


def _try(name: str, seed: int, policy: str, cluster: Cluster, window: Window, rate: float) -> Throughput:
    end_s = window.warmup_s + window.window_s
    # A little more than there is time for: sessions begin until the end.
    load = MADE_UP[name](max(1, round(1.1 * end_s * rate)), rate, seed)
    if policy == BOUND:
        cluster, policy_name = widen(cluster), "round_robin"
    else:
        policy_name = policy
    make_router = router_maker(policy_name, cluster, load.block_tokens)
    outcome = simulate(load, cluster, make_router, deadline_s=end_s + window.slo_s)
    # Who has no token at the deadline has waited longer than allowed.
    waits = [
        (job.first_token_at if job.first_token_at >= 0 else float("inf")) - job.arrived_at
        for job in outcome.jobs
        if window.warmup_s <= job.arrived_at < end_s
    ]
    return Throughput(
        load=name,
        policy=policy,
        seed=seed,
        slo_s=window.slo_s,
        requests_per_s=len(waits) / window.window_s,
        ttft_p99_s=summarize(waits).p99,
        hit_rate=round(outcome.hit_tokens / max(1, outcome.queried_tokens), 4),
    )
