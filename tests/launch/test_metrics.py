"""Series of engine cores across restarts."""

from phalanx.engine.messages import EngineStats
from phalanx.launch.metrics import ServerMetrics
from support.server import make_stats


def read(metrics: ServerMetrics, series: str) -> float:
    (line,) = [line for line in metrics.render().decode().splitlines() if line.startswith(series)]
    return float(line.rpartition(" ")[2])


def test_a_counter_goes_on_when_its_replica_starts_again() -> None:
    stats: dict[int, EngineStats] = {}
    metrics = ServerMetrics("m", lambda: stats, lambda: len(stats))
    series = "phalanx_num_preemptions_total{"
    seen = []

    for epoch, count in [(0, 3), (0, 5), (1, 1), (1, 4), (0, 5), (2, 0)]:
        stats[0] = make_stats(epoch=epoch, num_preemptions=count)
        seen.append(read(metrics, series))

    assert seen == [3, 5, 6, 9, 9, 9]


def test_a_replica_without_a_report_has_no_series() -> None:
    metrics = ServerMetrics("m", dict, lambda: 0)

    text = metrics.render().decode()

    assert "phalanx_num_requests_running{" not in text
    assert read(metrics, "phalanx_replicas_ready{") == 0
