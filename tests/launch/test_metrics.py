"""Series over restarts of replicas and of API servers, and the same from every server."""

import re
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.messages import FleetUpdate, ProcessInfo
from phalanx.cluster.replay import ReplayStats
from phalanx.cluster.supervision_events import ChildKind, ChildState, ReplicaMode
from phalanx.engine.messages import EngineStats
from phalanx.launch.metric_series import NUM_COLUMNS
from phalanx.launch.metrics import Place, ServerMetrics
from phalanx.shm.number_table import NumberTable
from support.server import make_stats


def read(metrics: ServerMetrics, series: str) -> float:
    (line,) = [line for line in metrics.render().decode().splitlines() if line.startswith(series)]
    return float(line.rpartition(" ")[2])


def make_table(num_servers: int) -> NumberTable:
    return NumberTable.private(num_servers, NUM_COLUMNS)


def make_metrics(table: NumberTable, row: int, **knows: object) -> ServerMetrics:
    return ServerMetrics("m", dict, lambda: 0, place=Place(table, row), **knows)  # type: ignore[arg-type]


def test_a_counter_goes_on_when_its_replica_starts_again() -> None:
    stats: dict[int, EngineStats] = {}
    metrics = ServerMetrics("m", lambda: stats, lambda: len(stats))
    series = "phalanx_num_preemptions_total{"
    seen = []

    for epoch, count in [(0, 3), (0, 5), (1, 1), (1, 4), (0, 5), (2, 0)]:
        stats[0] = make_stats(epoch=epoch, num_preemptions=count)
        seen.append(read(metrics, series))

    assert seen == [3, 5, 6, 9, 9, 9]


def test_a_counter_of_a_replica_outlives_the_servers_that_saw_it() -> None:
    table, stats = make_table(2), {0: make_stats(epoch=0, num_preemptions=5)}

    def start(row: int) -> ServerMetrics:
        return ServerMetrics("m", lambda: stats, lambda: 1, place=Place(table, row))

    servers = [start(0), start(1)]
    series = "phalanx_num_preemptions_total{"
    assert [read(server, series) for server in servers] == [5, 5]
    # The first one is away while the replica starts again, twice.
    for epoch, count in [(1, 3), (2, 1)]:
        stats[0] = make_stats(epoch=epoch, num_preemptions=count)
        servers[1].share()

    assert [read(server, series) for server in (start(0), servers[1])] == [9, 9]
    stats[0] = make_stats(epoch=2, num_preemptions=2)
    servers[0].share()
    assert read(servers[1], series) == 10


def test_a_replica_without_a_report_has_no_series() -> None:
    metrics = ServerMetrics("m", dict, lambda: 0)

    text = metrics.render().decode()

    assert "phalanx_num_requests_running{" not in text
    assert read(metrics, "phalanx_replicas_ready{") == 0


@dataclass
class Replay:
    """What a replay log has counted since its process began."""

    num_replayed: int = 0
    num_parked: int = 0

    def stats(self) -> ReplayStats:
        return ReplayStats(
            num_replayed=self.num_replayed,
            num_expired=0,
            num_blamed=0,
            num_stale_outputs=0,
            num_parked=self.num_parked,
        )


@dataclass
class Server:
    """One API server, which may be killed and started again."""

    table: NumberTable
    row: int
    replay: Replay = field(default_factory=Replay)

    def __post_init__(self) -> None:
        self.metrics = make_metrics(self.table, self.row, replay=lambda: self.replay.stats())

    def restart(self) -> None:
        self.replay = Replay()
        self.__post_init__()


@given(
    events=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["request", "token", "replay", "kill"])), max_size=60
    )
)
def test_every_server_tells_the_sum_of_what_all_have_ever_counted(events: list[tuple[int, str]]) -> None:
    table = make_table(3)
    servers = [Server(table, row) for row in range(3)]
    expected = {"request": 0, "token": 0.0, "replay": 0}
    for row, event in events:
        server = servers[row]
        match event:
            case "request":
                server.metrics.count_request("/v1/completions", 200)
            case "token":
                server.metrics.first_token.observe(0.25)
            case "replay":
                server.replay.num_replayed += 1
                server.metrics.share()
            case "kill":
                server.restart()
                continue
        expected[event] += 1

    for server in servers:
        text = server.metrics.render().decode()
        found = re.search(r'^phalanx_requests_total\{.*status="200"\} (\S+)$', text, re.MULTILINE)
        assert (float(found.group(1)) if found else 0) == expected["request"]
        assert read(server.metrics, "phalanx_requests_replayed_total{") == expected["replay"]
        assert read(server.metrics, "phalanx_time_to_first_token_seconds_count{") == expected["token"]
        assert read(server.metrics, "phalanx_time_to_first_token_seconds_sum{") == expected["token"] / 4
        assert 'le="0.15",model_name="m"} 0.0\n' in text
        assert f'le="0.3",model_name="m"}} {expected["token"]}' in text
        assert f'le="+Inf",model_name="m"}} {expected["token"]}' in text


def test_a_value_on_a_bound_is_in_its_bucket_and_a_huge_one_in_the_last() -> None:
    metrics = ServerMetrics("m", dict, lambda: 0)
    for value in (0.1, 0.1000001, 1e9):
        metrics.whole_request.observe(value)

    rows = re.findall(
        r'^phalanx_e2e_request_latency_seconds_bucket\{le="([^"]+)"\S* (\S+)$',
        metrics.render().decode(),
        re.MULTILINE,
    )
    counts = {bound: float(count) for bound, count in rows}
    assert (counts["0.1"], counts["0.25"], counts["640.0"], counts["+Inf"]) == (1, 2, 2, 3)


def test_paths_and_statuses_of_no_list_are_one_series() -> None:
    metrics = ServerMetrics("m", dict, lambda: 0)
    for route, status in [("/a", 200), ("/b", 200), ("/tokenize", 418), ("/tokenize", 299)]:
        metrics.count_request(route, status)

    assert read(metrics, 'phalanx_requests_total{model_name="m",route="other",status="200"}') == 2
    assert read(metrics, 'phalanx_requests_total{model_name="m",route="/tokenize",status="other"}') == 2


def test_what_a_dead_server_knew_last_is_no_gauge_any_more() -> None:
    processes = [
        ProcessInfo(
            role=role,
            kind=ChildKind.API_SERVER,
            state=state,
            mode=ReplicaMode.ACTIVE,
            pid=None,
            epoch=0,
            num_restarts=0,
            num_failures=0,
            num_hangs=0,
            last_error=None,
        )
        for role, state in (
            ("api0", ChildState.READY),
            ("api1", ChildState.PAUSED),
            ("api2", ChildState.READY),
        )
    ]
    fleet = FleetUpdate(replicas=[], processes=processes)
    table = make_table(3)
    servers = [
        make_metrics(table, row, fleet=lambda: fleet, replay=Replay(num_parked=parked).stats)
        for row, parked in enumerate((1, 10, 100))
    ]

    assert [read(server, "phalanx_requests_parked{") for server in servers] == [101, 111, 101]
