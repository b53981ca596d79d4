"""cluster-bench failover and torture: their arithmetic, whom they kill, and both commands on a tiny cluster."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.bench import failover, torture
from phalanx.launch.bench.cli import main
from phalanx.launch.bench.openai_client import RequestRecord
from phalanx.launch.bench.pauses import Death, explain_pauses, longest_pause_s, make_table
from phalanx.launch.bench.steady_load import make_bodies
from phalanx.shm.exit_codes import ExitCode
from support.children import is_gone, wait_until
from support.launch import TINY_MODEL

ROLES = ["api0", "coordinator", "dp0", "dp0 tp0", "dp1", "dp1 tp0", "supervisor"]
LAUNCH = ["--", str(TINY_MODEL), "--dp", "2", "--device", "cpu"]


def record(*token_at: float, index: int = 0, sent_at: float = 0.0, **fields: object) -> RequestRecord:
    defaults = {"response_id": f"cmpl-{index}", "ended_at": max(token_at, default=sent_at), "text": "t"}
    return RequestRecord(
        index=index, due_at=sent_at, sent_at=sent_at, token_at=list(token_at), **{**defaults, **fields}
    )


def test_a_stream_goes_on_after_its_longest_pause_around_the_death() -> None:
    # The piece at 10.1 was on its way when the replica died at 10.0.
    moved = record(9.8, 9.9, 10.1, 11.5, 11.6, 15.0, 15.1)

    assert failover.resumed_at(moved, killed_at=10.0) == 11.5


def test_a_death_is_judged_by_the_streams_that_moved() -> None:
    death = failover._Death(victim="dp0 tp0", killed_at=10.0, back_at=14.0, moved_ids={"cmpl-0", "cmpl-1"})
    kill = failover.judge(
        death,
        [
            record(9.9, 11.0, 11.1),
            record(9.8, 12.0, 12.1, index=1),
            record(9.9, 10.0, 10.1, index=2),
            record(9.9, ended_at=10.5, index=3, error="the stream ended early"),
            record(11.0, 12.0, index=4, sent_at=10.5),
        ],
    )

    assert (kill.num_moved, kill.num_lost, kill.back_s) == (2, 1, 4.0)
    assert (kill.first_resumed_s, kill.last_resumed_s) == (pytest.approx(1.0), pytest.approx(2.0))


def test_a_death_that_hit_nobody_has_no_pause() -> None:
    death = failover._Death(victim="dp1", killed_at=10.0, back_at=14.0, moved_ids=set())
    kill = failover.judge(death, [record(9.9, 10.0, 10.1)])
    (table,) = failover.make_tables(
        failover.FailoverRun(kills=[kill], num_requests=1, num_lost=0, piece_p50_ms=1.0, piece_p99_ms=2.0)
    )

    assert table.rows == [["engine core", "1", "-", "-", "4.00", "0", "0"]]


@given(seed=st.integers(0, 2**32), hurt=st.sets(st.integers(0, 2)), num_replicas=st.integers(2, 3))
def test_a_replica_is_always_left_alone(seed: int, hurt: set[int], num_replicas: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        victim = torture.choose_victim(rng, ROLES, hurt, num_replicas)
        assert victim != "supervisor"
        if victim is not None and victim.startswith("dp"):
            assert len(hurt | {torture.dp_rank_of(victim)}) < num_replicas


def test_everything_gets_its_turn_while_all_is_well() -> None:
    rng = random.Random(1)
    drawn = {torture.choose_victim(rng, ROLES, set(), 2) for _ in range(500)}

    assert drawn == set(ROLES) - {"supervisor"}


def test_only_what_an_api_server_held_may_break_with_it() -> None:
    run = torture.judge(
        [
            record(1.0, 1.5, 4.0),
            record(1.0, index=1, text="other"),
            record(index=2, sent_at=9.0, ended_at=10.1, error="connection: ConnectionResetError"),
            record(index=3, sent_at=9.0, ended_at=15.0, error="status 503", error_detail="no replica"),
        ],
        [record(0.5, index=index) for index in range(4)],
        [Death(victim="api0", at_s=8.0)],
        2.0,
        duration_s=60.0,
        seed=0,
        memory=[
            torture.MemorySample(at_s=at, is_whole=at != 2, supervisor_bytes=1 << 20, all_bytes=3 << 20)
            for at in range(4)
        ],
    )

    assert (run.num_requests, run.num_lost, run.num_broken, run.num_different) == (4, 1, 1, 1)
    assert run.errors == {"status 503: no replica": 1}
    assert (run.undisturbed.max, run.tortured.max) == (500.0, 2500.0)
    assert [(group.deaths, group.longest_s) for group in run.slow] == [([], 2.5)]
    rows = {row[0]: row[1] for row in torture.make_tables(run)[0].rows}
    assert rows["memory of all processes, first and last third, MiB"] == "3.00 / 3.00"


def test_a_long_pause_is_told_with_the_deaths_that_lay_in_it() -> None:
    deaths = [
        Death(victim="dp0", at_s=0.0),
        Death(victim="api0", at_s=5.0),
        Death(victim="dp1 tp0", at_s=6.0),
        Death(victim="coordinator", at_s=20.0),
    ]
    slow = explain_pauses(
        [
            record(107.5, index=0, sent_at=105.1),  # sent just after api0 had died, before dp1 tp0 did
            record(
                104.0, 105.3, 108.3, index=1, sent_at=103.0
            ),  # the last piece was on its way when api0 died
            record(130.0, 130.5, 133.0, index=2, sent_at=129.9),
            record(119.5, 120.1, index=3, sent_at=119.4),
        ],
        deaths,
        began_at=100.0,
        longer_than_s=0.7,
    )

    api_and_dp1 = deaths[1:3]
    assert [(group.deaths, group.num_streams, group.num_first) for group in slow] == [
        (api_and_dp1, 2, 1),
        ([], 1, 0),
    ]
    assert [group.longest_s for group in slow] == [pytest.approx(3.0), pytest.approx(2.5)]
    assert slow[0].began_at_s == pytest.approx(5.3)
    assert make_table(slow).rows[0] == ["api0 at 5.0 s, dp1 tp0 at 6.0 s", "2", "1", "5.3", "3000"]


def test_the_first_piece_is_waited_for_as_well() -> None:
    assert longest_pause_s(record(2.0, 2.5)) == 2.0
    assert longest_pause_s(record()) == 0.0


def test_bodies_are_the_same_for_the_same_seed_and_no_two_are_alike() -> None:
    bodies = make_bodies("tiny", 8, input_len=5, output_len=7, seed=3)

    assert bodies == make_bodies("tiny", 8, input_len=5, output_len=7, seed=3)
    assert len(set(bodies)) == 8


@pytest.mark.full
def test_one_replica_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["failover", "--", str(TINY_MODEL), "--device", "cpu"]) == 1
    assert "at least two replicas" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "words",
    [
        ["failover", "--kills", "1", "--concurrency", "8", "--output-len", "100"],
        ["torture", "--minutes", "0.5", "--concurrency", "8", "--output-len", "60"],
    ],
    ids=lambda words: words[0],
)
def test_both_lose_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *LAUNCH]) == 0, capsys.readouterr().err
    assert "requests lost" in capsys.readouterr().out


def test_a_benchmark_that_is_told_to_end_takes_its_cluster_along() -> None:
    command = [sys.executable, "-m", "phalanx.launch.bench", "startup", "--repetitions", "1000", *LAUNCH]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
        wait_until(lambda: children.read_text(encoding="ascii") != "", timeout_s=60)
        (cluster,) = map(int, children.read_text(encoding="ascii").split())
        bench.terminate()

        assert bench.wait(60) == ExitCode.INTERRUPTED
    wait_until(lambda: is_gone(cluster), timeout_s=10)
