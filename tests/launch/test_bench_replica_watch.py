"""What a benchmark reads of the replicas in the cluster's metrics."""

import msgspec
import pytest

from phalanx.launch.bench.errors import BenchError
from phalanx.launch.bench.replica_watch import ReplicaSample, load_of, make_table, parse_samples
from phalanx.launch.metrics import ServerMetrics
from support.server import make_stats


def sample(at_s: float, **fields: float) -> ReplicaSample:
    values = dict.fromkeys(
        ("num_running", "num_waiting", "prefill_tokens", "output_tokens", "num_steps", "num_preemptions"), 0
    )
    return ReplicaSample(at_s=at_s, busy_s=fields.pop("busy_s", 0.0), **{**values, **fields})  # type: ignore[arg-type]


def test_a_load_is_what_was_counted_since_the_first_sample() -> None:
    load = load_of(
        1,
        [
            sample(0.0, output_tokens=100, prefill_tokens=50, num_steps=10, busy_s=1.0),
            sample(0.1, output_tokens=104, prefill_tokens=850, num_steps=12, num_running=4, num_waiting=2),
            sample(0.2, output_tokens=110, prefill_tokens=1050, num_steps=14, num_running=6),
            sample(0.4, output_tokens=140, prefill_tokens=1050, num_steps=19, num_running=5, busy_s=1.25),
        ],
        output_len=8,
    )

    assert (load.dp_rank, load.num_requests, load.num_steps, load.prefill_tokens) == (1, 5.0, 9, 1000)
    assert (load.max_running, load.max_waiting, load.num_preemptions, load.busy_s) == (6, 2, 0, 0.25)
    # 800 tokens in two steps, then 200 in two; none in the last interval.
    assert (load.prompt_step_tokens, load.prompt_s) == (250.0, pytest.approx(0.2))
    assert make_table({"dp 2, run 1": [load]}).rows == [
        ["dp 2, run 1, 1", "5", "6", "2", "9", "1000", "250", "0.200", "0", "0.250"]
    ]


def test_metrics_without_a_series_are_refused() -> None:
    with pytest.raises(BenchError, match="lack a series"):
        parse_samples('phalanx_num_requests_running{dp_rank="0",model_name="m"} 3.0\n', 0.0)


def test_the_servers_own_metrics_are_understood() -> None:
    stats = {
        0: make_stats(num_running=3, num_waiting=2, num_prefill_tokens_total=70, busy_s=0.5),
        1: make_stats(num_output_tokens_total=9, num_steps=4, num_preemptions=1),
    }
    stats[1] = msgspec.structs.replace(stats[1], dp_rank=1)
    text = ServerMetrics("m", lambda: stats, lambda: 2).render().decode()

    samples = parse_samples(text, 1.5)

    first, second = samples[0], samples[1]
    assert (first.at_s, first.num_running, first.num_waiting, first.prefill_tokens, first.busy_s) == (
        1.5, 3, 2, 70, 0.5,
    )  # fmt: skip
    assert (second.output_tokens, second.num_steps, second.num_preemptions) == (9, 4, 1)
