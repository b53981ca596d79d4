"""What the records of one run say of a server. Pure.

Called by: serve.py. Durations in milliseconds:

  TTFT  from sending a request to its first piece of text
  TPOT  time per output token after the first: (last piece - first piece) / (output tokens - 1)
  ITL   between two pieces of one stream
  E2E   from sending to the end of the stream
  lag   from when the request was due to its sending: what the client itself was late
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from .openai_client import RequestRecord
from .report import Table, show_number, show_spread
from .stats import Summary, over_runs, summarize

LATENCIES = ("ttft", "tpot", "itl", "e2e")
QUANTILES = ("p50", "p90", "p99", "p999")


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """Limits in ms that a request must keep to count as good; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @property
    def is_empty(self) -> bool:
        """True when nothing is asked."""
        return self.ttft is None and self.tpot is None and self.e2e is None


class ServeRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run against one server.

    duration_s:   from the first sending to the last end
    goodput:      good requests per second; None without objectives
    errors:       failed requests by kind; they count in nothing else
    error_details: for each kind, what the server said of the first one
    max_in_flight: most requests under way at once
    """

    run: int
    target: str
    num_requests: int
    num_completed: int
    errors: dict[str, int]
    error_details: dict[str, str]
    duration_s: float
    max_in_flight: int
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput: float | None
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2e: Summary
    lag: Summary


def measure_run(
    records: Sequence[RequestRecord], *, run: int, target: str, objectives: Objectives
) -> ServeRun:
    """Count and time the records of one run; at least one."""
    good = [record for record in records if record.error is None]
    duration_s = max(record.ended_at for record in records) - min(record.sent_at for record in records)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in good)
    num_output_tokens = sum(record.num_output_tokens for record in good)
    per_second = 1.0 / duration_s if duration_s > 0 else 0.0
    num_kept = sum(_keeps(record, objectives) for record in good)
    return ServeRun(
        run=run,
        target=target,
        num_requests=len(records),
        num_completed=len(good),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        # Backwards, so that the first of a kind stays.
        error_details={record.error: record.error_detail for record in reversed(records) if record.error},
        duration_s=duration_s,
        max_in_flight=max_in_flight(records),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        requests_per_s=len(good) * per_second,
        output_tokens_per_s=num_output_tokens * per_second,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) * per_second,
        goodput=None if objectives.is_empty else num_kept * per_second,
        ttft=summarize(ttft_ms(record) for record in good),
        tpot=summarize(value for record in good if (value := tpot_ms(record)) is not None),
        itl=summarize(gap for record in good for gap in itl_ms(record)),
        e2e=summarize(e2e_ms(record) for record in good),
        lag=summarize((record.sent_at - record.due_at) * 1e3 for record in records),
    )


def ttft_ms(record: RequestRecord) -> float:
    """Return the time to the first piece of text of a request that ended well."""
    return (record.token_at[0] - record.sent_at) * 1e3


def tpot_ms(record: RequestRecord) -> float | None:
    """Return the time per output token after the first; None when there was only one."""
    if record.num_output_tokens < 2:
        return None
    return (record.token_at[-1] - record.token_at[0]) * 1e3 / (record.num_output_tokens - 1)


def itl_ms(record: RequestRecord) -> list[float]:
    """Return the gaps between the pieces of one stream."""
    return [
        (later - earlier) * 1e3 for earlier, later in zip(record.token_at, record.token_at[1:], strict=False)
    ]


def e2e_ms(record: RequestRecord) -> float:
    """Return the time from sending to the end."""
    return (record.ended_at - record.sent_at) * 1e3


def max_in_flight(records: Sequence[RequestRecord]) -> int:
    """Return how many requests were under way at once, at most."""
    # An end comes before a start at the same instant.
    changes = sorted(
        [(record.sent_at, 1) for record in records] + [(record.ended_at, -1) for record in records]
    )
    most = current = 0
    for _, change in changes:
        current += change
        most = max(most, current)
    return most


def make_tables(runs: Sequence[ServeRun]) -> list[Table]:
    """Lay out the runs: throughput, latencies, and errors when there were any."""
    by_target: dict[str, list[ServeRun]] = {}
    for run in runs:
        by_target.setdefault(run.target, []).append(run)
    tables = [_throughput_table(by_target), _latency_table(by_target)]
    if any(run.errors for run in runs):
        tables.append(_error_table(by_target))
    return tables


def _keeps(record: RequestRecord, objectives: Objectives) -> bool:
    tpot = tpot_ms(record)
    return (
        (objectives.ttft is None or ttft_ms(record) <= objectives.ttft)
        and (objectives.tpot is None or tpot is None or tpot <= objectives.tpot)
        and (objectives.e2e is None or e2e_ms(record) <= objectives.e2e)
    )


def _throughput_table(by_target: Mapping[str, Sequence[ServeRun]]) -> Table:
    columns = [
        "server",
        "completed",
        "duration s",
        "requests/s",
        "output tokens/s",
        "tokens/s",
        "most in flight",
    ]
    has_goodput = any(run.goodput is not None for runs in by_target.values() for run in runs)
    rows = []
    for target, runs in by_target.items():
        row = [
            target,
            f"{sum(run.num_completed for run in runs)}/{sum(run.num_requests for run in runs)}",
            *(
                show_spread(over_runs(getattr(run, name) for run in runs))
                for name in ("duration_s", "requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
            ),
            str(max(run.max_in_flight for run in runs)),
        ]
        if has_goodput:
            row.append(show_spread(over_runs(run.goodput or 0.0 for run in runs)))
        rows.append(row)
    return Table(title="Throughput", columns=columns + ["good requests/s"] * has_goodput, rows=rows)


def _latency_table(by_target: Mapping[str, Sequence[ServeRun]]) -> Table:
    rows = []
    for target, runs in by_target.items():
        for name in (*LATENCIES, "lag"):
            summaries: list[Summary] = [getattr(run, name) for run in runs]
            quantiles = [
                over_runs(getattr(summary, quantile) for summary in summaries) for quantile in QUANTILES
            ]
            mean = over_runs(summary.mean for summary in summaries)
            rows.append(
                [
                    f"{target} {name.upper() if name != 'lag' else name}",
                    show_number(mean.median),
                    show_spread(quantiles[0]),
                    *(show_number(spread.median) for spread in quantiles[1:]),
                    show_number(max(summary.max for summary in summaries)),
                ]
            )
    return Table(
        title="Latency in ms",
        columns=["server", "mean", "p50", "p90", "p99", "p99.9", "max"],
        rows=rows,
        note="lag: what the client itself sent late; large values mean that the client was the bottleneck.",
    )


def _error_table(by_target: Mapping[str, Sequence[ServeRun]]) -> Table:
    rows = []
    for target, runs in by_target.items():
        counts: Counter[str] = Counter()
        details: dict[str, str] = {}
        for run in runs:
            counts.update(run.errors)
            details = run.error_details | details
        for kind, count in counts.most_common():
            # A bar would end the cell of a table in markdown.
            detail = " ".join(details.get(kind, "").replace("|", "/").split())
            rows.append([f"{target}: {kind}", str(count), detail])
    return Table(title="Failed requests", columns=["what", "requests", "the first one"], rows=rows)
