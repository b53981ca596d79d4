"""cluster-bench serve: what it sends, what it counts, what it makes of a server that misbehaves."""

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.bench.cli import main
from phalanx.launch.bench.openai_client import RequestRecord
from phalanx.launch.bench.serve_metrics import Objectives, make_tables, max_in_flight, measure_run
from phalanx.launch.bench.sse_decoder import SseDecoder
from support.fake_openai import MODEL, FakeOpenAI, fake_openai
from support.tokenizers import build_byte_level


def measure(server: FakeOpenAI, stem: Path, *arguments: str) -> dict[str, Any]:
    """Run the benchmark once against `server`; return its only run."""
    common = ["--repetitions", "1", "--warmup", "0", "--input-len", "8", "--output-len", "6"]
    code = main(["serve", "--url", server.url, *common, *arguments, "--out", str(stem)])
    assert code == 0
    report = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
    (run,) = report["runs"]
    assert isinstance(run, dict)
    return run


@pytest.mark.parametrize("behaviour", ["ok", "two_a_piece", "no_usage", "bytewise"])
def test_tokens_are_counted_however_they_are_sent(behaviour: str, tmp_path: Path) -> None:
    with fake_openai(behaviour) as server:
        run = measure(server, tmp_path / "r", "--num-requests", "10", "--concurrency", "3")

    assert run["num_completed"] == 10
    assert run["errors"] == {}
    assert run["num_output_tokens"] == 60
    assert run["num_prompt_tokens"] == (0 if behaviour == "no_usage" else 80)
    assert run["max_in_flight"] == 3
    pieces = 3 if behaviour == "two_a_piece" else 6
    assert run["itl"]["count"] == 10 * (pieces - 1)
    assert run["ttft"]["count"] == run["tpot"]["count"] == run["e2e"]["count"] == 10
    assert 0 < run["ttft"]["p50"] <= run["e2e"]["p50"]
    assert run["output_tokens_per_s"] == pytest.approx(60 / run["duration_s"])


def test_requests_are_what_was_asked_for_and_connections_are_used_again(tmp_path: Path) -> None:
    with fake_openai() as server:
        measure(server, tmp_path / "r", "--num-requests", "6", "--concurrency", "1", "--api-key", "secret")

    assert server.paths == ["/v1/models"] + ["/v1/completions"] * 6
    assert server.num_connections == 1
    assert all("Authorization: Bearer secret" in head for head in server.headers)
    for body in server.bodies:
        assert (body["model"], body["max_tokens"], len(body["prompt"])) == (MODEL, 6, 8)
        assert body["stream"] is body["ignore_eos"] is True
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 6
    assert "secret" not in (tmp_path / "r.json").read_text(encoding="utf-8")
    assert "secret" not in (tmp_path / "r.md").read_text(encoding="utf-8")


def test_failures_are_counted_by_kind_and_in_nothing_else(tmp_path: Path) -> None:
    behaviours = ("busy", "busy", "error_event", "early_end", "broken", "garbage", "ok")
    with fake_openai(*behaviours) as server:
        run = measure(server, tmp_path / "r", "--num-requests", "10", "--concurrency", "1")

    assert run["errors"] == {
        "status 429": 2,
        "error event: replica_lost": 1,
        "the stream ended early": 1,
        "connection: ConnectionResetError": 1,
        "a chunk that does not decode": 1,
    }
    assert (run["num_completed"], run["num_output_tokens"], run["ttft"]["count"]) == (4, 24, 4)
    page = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert '| server: status 429 | 2 | {"error": {"message": "later"}} |' in page


def test_a_stream_without_text_counts_its_end_as_the_first_that_is_seen(tmp_path: Path) -> None:
    with fake_openai("silent") as server:
        run = measure(server, tmp_path / "r", "--num-requests", "2", "--concurrency", "1")

    assert (run["num_completed"], run["num_output_tokens"]) == (2, 12)
    assert run["ttft"]["p50"] == run["e2e"]["p50"]


def test_an_open_loop_does_not_wait_for_the_server(tmp_path: Path) -> None:
    with fake_openai() as server:
        run = measure(server, tmp_path / "r", "--num-requests", "30", "--rate", "300")

    # 29 gaps of 1/300 s on average, and no request is sent before it is due; the loop's clock counts milliseconds.
    assert run["num_completed"] == 30
    assert run["duration_s"] > 0.04
    assert run["lag"]["min"] > -2.0


def test_chat_sends_text_of_about_the_right_length(tmp_path: Path) -> None:
    folder = build_byte_level(tmp_path / "tokenizer")
    with fake_openai() as server:
        arguments = (
            "--endpoint",
            "chat",
            "--tokenizer",
            str(folder),
            "--num-requests",
            "3",
            "--concurrency",
            "2",
        )
        run = measure(server, tmp_path / "r", *arguments)

    assert run["num_output_tokens"] == 18
    assert server.paths[1:] == ["/v1/chat/completions"] * 3
    for body in server.bodies:
        (message,) = body["messages"]
        assert message["role"] == "user"
        assert message["content"]


def test_each_run_sends_prompts_of_its_own_and_all_servers_of_a_run_the_same(tmp_path: Path) -> None:
    with fake_openai() as one, fake_openai() as two:
        arguments = ["--num-requests", "3", "--concurrency", "1", "--repetitions", "2", "--warmup", "1"]
        urls = ["--url", f"one={one.url}", "--url", f"two={two.url}"]
        assert main(["serve", *urls, *arguments, "--input-len", "4", "--out", str(tmp_path / "r")]) == 0

    prompts = [[tuple(body["prompt"]) for body in server.bodies] for server in (one, two)]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == 8
    page = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert "| one TTFT |" in page
    assert "| two TTFT |" in page


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--endpoint", "chat"], "chat needs text"),
        (["--url", "ftp://x"], "no address of an HTTP server"),
        (["--url", "http://a", "--url", "http://b"], "names of their own"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_a_server_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_openai() as server:
        url = server.url
    assert main(["serve", "--url", url, "--num-requests", "1"]) == 1
    assert "does not say which models it has" in capsys.readouterr().err


def record(**fields: Any) -> RequestRecord:
    defaults: dict[str, Any] = {"index": 0, "due_at": 10.0, "sent_at": 10.0, "ended_at": 12.0}
    return RequestRecord(**{**defaults, "token_at": [10.5, 11.0, 12.0], "num_output_tokens": 5, **fields})


def test_latencies_are_what_they_are_defined_to_be() -> None:
    records = [
        record(due_at=9.9, num_prompt_tokens=7),
        record(index=1, sent_at=11.0, due_at=11.0, ended_at=14.0, token_at=[14.0], num_output_tokens=1),
        record(index=2, sent_at=12.0, ended_at=20.0, error="timeout"),
    ]
    run = measure_run(records, run=0, target="x", objectives=Objectives(ttft=600.0, tpot=375.0))

    assert run.ttft.max == pytest.approx(3000.0)
    assert run.ttft.min == pytest.approx(500.0)
    assert (run.tpot.count, run.tpot.p50) == (1, pytest.approx(1500.0 / 4))
    assert (run.itl.count, run.itl.max) == (2, pytest.approx(1000.0))
    assert run.e2e.mean == pytest.approx(2500.0)
    assert run.lag.max == pytest.approx(2000.0)
    assert run.duration_s == 10.0
    assert (run.num_requests, run.num_completed, run.errors) == (3, 2, {"timeout": 1})
    assert run.output_tokens_per_s == pytest.approx(0.6)
    assert run.total_tokens_per_s == pytest.approx(1.3)
    assert run.goodput == pytest.approx(0.1)


def test_only_failures_still_make_tables() -> None:
    run = measure_run([record(error="status 503", token_at=[])], run=0, target="x", objectives=Objectives())

    titles = [table.title for table in make_tables([run])]
    assert titles == ["Throughput", "Latency in ms", "Failed requests"]
    assert msgspec.json.decode(msgspec.json.encode(run))["goodput"] is None


def test_requests_in_flight_are_counted_and_an_end_comes_before_a_start() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)]
    assert max_in_flight([record(sent_at=start, ended_at=end) for start, end in spans]) == 2


@given(
    events=st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1), max_size=5),
    end=st.sampled_from(["\n", "\r\n"]),
    cuts=st.lists(st.integers(0, 200)),
)
def test_events_come_out_whole_wherever_the_stream_is_cut(
    events: list[str], end: str, cuts: list[int]
) -> None:
    stream = "".join(f":x{end}event: y{end}data: {event}{end}{end}" for event in events).encode()
    bounds = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})

    decoder = SseDecoder()
    decoded = [
        event for first, last in itertools.pairwise(bounds) for event in decoder.feed(stream[first:last])
    ]

    assert decoded == [event.encode() for event in events]


def test_data_lines_of_one_event_are_joined_and_carriage_returns_end_lines() -> None:
    assert SseDecoder().feed(b"data: a\ndata:b\n\n") == [b"a\nb"]
    assert SseDecoder().feed(b"data: a\r\rdata: b\r\r\n") == [b"a", b"b"]
    assert SseDecoder().feed(b"\n\nid: 1\n\n") == []
