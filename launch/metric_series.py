"""Which numbers the metrics have, and where in an API server's row of the shared table each of them stands.

Called by: metrics.py, and runtime.py for the table's size. Values, nothing else; no HTTP, no Prometheus.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..cluster.admin import MAX_REPLICAS
from ..cluster.messages import ProcessInfo
from ..cluster.replay import ReplayStats
from ..cluster.routing import RoutingReason
from ..engine.messages import EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSeries:
    """One counter family.

    label_values: of each series, in the order of label_names: all there can be, since each has its place in the row
    shows_zeros:  also series that never counted are shown
    """

    name: str
    text: str
    label_names: tuple[str, ...] = ()
    label_values: tuple[tuple[str, ...], ...] = ((),)
    shows_zeros: bool = True

    @property
    def num_columns(self) -> int:
        """Numbers of one row."""
        return len(self.label_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramSeries:
    """One histogram. buckets: upper bounds, ascending, without infinity."""

    name: str
    text: str
    buckets: tuple[float, ...]

    @property
    def num_columns(self) -> int:
        """Numbers of one row: each bucket's own count, that of larger values, and the sum of all values."""
        return len(self.buckets) + 2


class Columns:
    """Where in a row each series has its numbers: the same in every process, since the list is."""

    def __init__(self, series: Sequence[CounterSeries | HistogramSeries]) -> None:
        self.series = tuple(series)
        self._first: dict[str, int] = {}
        self.num_columns = 0
        for each in series:
            self._first[each.name] = self.num_columns
            self.num_columns += each.num_columns

    def first(self, name: str) -> int:
        """Return the first column of a series."""
        return self._first[name]


OTHER = "other"
"""Label of what is in no list: clients must not make up series without end."""
COUNTED_ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", OTHER)
COUNTED_STATUSES = (
    *("200", "400", "401", "403", "404", "405", "408", "409", "413", "415", "422", "429", "499"),
    *("500", "503", "504", OTHER),
)

REQUESTS = CounterSeries(
    name="phalanx_requests",
    text="HTTP requests by route and status; 499: the client left.",
    label_names=("route", "status"),
    label_values=tuple((route, status) for route in COUNTED_ROUTES for status in COUNTED_STATUSES),
    shows_zeros=False,
)
FIRST_TOKEN = HistogramSeries(
    name="phalanx_time_to_first_token_seconds",
    text="From arrival to the first output.",
    buckets=(0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0),
)
BETWEEN_TOKENS = HistogramSeries(
    name="phalanx_inter_token_latency_seconds",
    text="Between one output and the next.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0),
)
WHOLE_REQUEST = HistogramSeries(
    name="phalanx_e2e_request_latency_seconds",
    text="From arrival to the last output.",
    buckets=(0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
PROMPT_TOKENS = CounterSeries(name="phalanx_prompt_tokens", text="Prompt tokens of served requests.")
GENERATION_TOKENS = CounterSeries(name="phalanx_generation_tokens", text="Output tokens.")
DECISIONS = CounterSeries(
    name="phalanx_routing_decisions",
    text="Requests routed, by reason.",
    label_names=("reason",),
    label_values=tuple((reason.value,) for reason in RoutingReason),
)
REPLAY: Mapping[CounterSeries, Callable[[ReplayStats], int]] = {
    CounterSeries(
        name="phalanx_requests_replayed", text="Times that a request went on with another replica."
    ): lambda stats: stats.num_replayed,
    CounterSeries(
        name="phalanx_requests_expired",
        text="Requests that found no replica in time after theirs was lost.",
    ): lambda stats: stats.num_expired,
    CounterSeries(
        name="phalanx_requests_blamed", text="Requests that were ended because replicas died of them."
    ): lambda stats: stats.num_blamed,
    CounterSeries(
        name="phalanx_outputs_stale", text="Outputs of earlier attempts that were dropped."
    ): lambda stats: stats.num_stale_outputs,
}
GAUGES: Mapping[str, tuple[str, Callable[[EngineStats], float]]] = {
    "phalanx_num_requests_running": ("Requests in the running batch.", lambda stats: stats.num_running),
    "phalanx_num_requests_waiting": ("Requests that wait to be admitted.", lambda stats: stats.num_waiting),
    "phalanx_kv_cache_usage_ratio": (
        "Part of the KV blocks held by running requests.",
        lambda stats: stats.kv_usage,
    ),
    "phalanx_kv_blocks_free": (
        "Free KV blocks, evictable ones included.",
        lambda stats: stats.num_free_blocks,
    ),
    "phalanx_kv_blocks_total": ("KV blocks of the replica.", lambda stats: stats.num_blocks),
}
COUNTERS: Mapping[str, tuple[str, Callable[[EngineStats], float]]] = {
    "phalanx_prefix_cache_queried_tokens": (
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prefix_queried_tokens,
    ),
    "phalanx_prefix_cache_hit_tokens": (
        "Prompt tokens found in the prefix cache.",
        lambda stats: stats.prefix_hit_tokens,
    ),
    "phalanx_num_preemptions": ("Requests whose blocks were taken.", lambda stats: stats.num_preemptions),
    "phalanx_engine_steps": ("Steps of the engine core.", lambda stats: stats.num_steps),
    "phalanx_engine_prefill_tokens": (
        "Prompt tokens that were computed, prefix hits left out.",
        lambda stats: stats.num_prefill_tokens_total,
    ),
    "phalanx_engine_output_tokens": (
        "Output tokens that were computed.",
        lambda stats: stats.num_output_tokens_total,
    ),
    "phalanx_engine_context_tokens": (
        "Tokens in the KV cache for the requests of a step, summed over the steps.",
        lambda stats: stats.num_context_tokens_total,
    ),
    "phalanx_engine_busy_seconds": ("Time with a step in flight.", lambda stats: stats.busy_s),
}
PROCESS_COUNTERS: Mapping[str, tuple[str, Callable[[ProcessInfo], int]]] = {
    "phalanx_process_restarts": (
        "Starts of a process beyond its first, after a death or by an operator's wish.",
        lambda process: process.num_restarts,
    ),
    "phalanx_process_failures": (
        "Deaths of a process, those after a hang included.",
        lambda process: process.num_failures,
    ),
    "phalanx_process_hangs": (
        "Times that a process was ended because it, or a worker of it, stood still.",
        lambda process: process.num_hangs,
    ),
}
"""Counted by the supervisor, so that they go on whichever process is started again."""

COLUMNS = Columns(
    [
        *(REQUESTS, FIRST_TOKEN, BETWEEN_TOKENS, WHOLE_REQUEST, PROMPT_TOKENS, GENERATION_TOKENS),
        *(DECISIONS, *REPLAY),
    ]
)
COLUMNS_PER_REPLICA = 1 + 2 * len(COUNTERS)
PARKED = COLUMNS.num_columns
SNAPSHOT_AT = PARKED + 1
FIRST_OF_REPLICAS = SNAPSHOT_AT + 1
NUM_COLUMNS = FIRST_OF_REPLICAS + MAX_REPLICAS * COLUMNS_PER_REPLICA
"""Of the table: one row for each API server."""
