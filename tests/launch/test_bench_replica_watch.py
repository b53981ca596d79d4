"""What a benchmark reads of the replicas in the cluster's metrics."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest

from phalanx.launch.bench.errors import BenchError
from phalanx.launch.bench.replica_watch import ReplicaSample, ReplicaWatch, load_of, make_table, parse_samples
from phalanx.launch.metrics import ServerMetrics
from support.children import wait_until
from support.server import make_stats


@contextmanager
def serve_metrics(render: Callable[[], bytes]) -> Iterator[str]:
    """Answer every question with what `render` gives then; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = render()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


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


def test_a_watch_waits_until_all_replicas_have_told_of_all_tokens() -> None:
    asked: list[int] = []

    def render() -> bytes:
        number = len(asked)
        asked.append(number)
        # The second replica is not heard of at first, and later reports than the other.
        stats = {0: make_stats(num_output_tokens_total=7 + min(16, 8 * number), num_running=number % 3)}
        if number:
            stats[1] = msgspec.structs.replace(
                make_stats(num_output_tokens_total=24 if number > 8 else 0), dp_rank=1
            )
        return ServerMetrics("m", lambda: stats, lambda: 2).render()

    with serve_metrics(render) as url:
        with ReplicaWatch(url, 2) as watch:
            wait_until(lambda: len(asked) > 3, timeout_s=30.0, what="a few questions")
        loads = watch.loads(num_output_tokens=8 + 24, output_len=8)

    assert [(load.dp_rank, load.num_requests) for load in loads] == [(0, 1.0), (1, 3.0)]


def test_of_many_samples_some_are_kept() -> None:
    load = load_of(0, [sample(0.1 * number, num_steps=number) for number in range(100)], output_len=8)

    assert load.num_steps == 99
    assert [one.num_steps for one in load.samples] == list(range(0, 100, 3))
