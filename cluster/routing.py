"""The words of routing: what a balancer is asked, and what it answers.

Called by: load_balancer.py decides, DpClient asks and counts the reasons. Values, nothing else.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec


class RoutingPolicy(StrEnum):
    """How a request finds its replica; see load_balancer.py and prefix_policy.py."""

    PREFIX_AWARE = "prefix_aware"
    KV_AWARE = "kv_aware"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    ROUND_ROBIN = "round_robin"


class RoutingReason(StrEnum):
    """Why a replica was chosen. A label of the metric: names stay."""

    ASKED_FOR = "asked_for"
    """The client named it."""
    SESSION = "session"
    """Earlier requests of the session went there."""
    GROUP = "group"
    """Another sample of the same prompt went there."""
    PREFIX = "prefix"
    """It holds more of the prompt than the least busy replica does."""
    LOAD = "load"
    """It has the least work."""
    BOUND = "bound"
    """The best one has too much more work than the mean already."""
    TURN = "turn"
    """It is its turn, or it was drawn."""
    ONLY = "only"
    """No other replica serves."""
    REPLAY = "replay"
    """The replica that had the request was lost, or none served when it came."""


class RoutingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a front end routes.

    num_clients:     front ends of the cluster
    sticky_sessions: requests of one session stay on one replica while it has room
    max_num_waiting: requests that may wait in all replicas together; None: only each replica's own limit counts
    """

    policy: RoutingPolicy = RoutingPolicy.PREFIX_AWARE
    num_clients: int = 1
    sticky_sessions: bool = False
    max_num_waiting: int | None = None
    max_num_waiting_per_replica: int = 4096
    max_num_batched_tokens: int = 2048


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a balancer must know of a request.

    num_cached_tokens: by dp_rank, prompt tokens that the replica holds; replicas that hold none are left out
    """

    num_prompt_tokens: int
    num_cached_tokens: Mapping[int, int]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes, and why.

    scores: by dp_rank, in the policy's own unit, the lowest wins; empty when nothing was compared
    num_cached_tokens: prompt tokens that are expected to be there
    """

    dp_rank: int
    reason: RoutingReason
    scores: Mapping[int, float]
    num_cached_tokens: int = 0


def scores_text(scores: Mapping[int, float]) -> str:
    """Write scores as a header's value: "0=1290.5, 1=83.0"."""
    return ", ".join(f"{dp_rank}={score:.1f}" for dp_rank, score in sorted(scores.items()))


def rotated(count: int, turn: int) -> Sequence[int]:
    """Return 0 to count - 1, from `turn` on: so that equals take turns."""
    start = turn % count
    return (*range(start, count), *range(start))
