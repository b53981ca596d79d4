"""cluster-bench ring, executor, scheduler and startup, each as small as can be."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.bench.cli import main
from phalanx.launch.bench.decode_load import decode_steps
from phalanx.launch.bench.errors import BenchError
from phalanx.launch.bench.peer_process import PeerProcess
from phalanx.launch.bench.ring import CellRun, make_tables
from phalanx.launch.bench.startup import StartupRun, read_table
from phalanx.launch.bench.startup import make_tables as make_startup_tables

PRINTED = """ready soon
processes
┏━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━━━━━━┓
┃ process ┃   pid ┃ ready after s ┃
┡━━━━━━━━━╇━━━━━━━╇━━━━━━━━━━━━━━━┩
│ dp0     │ 18030 │          7.71 │
└─────────┴───────┴───────────────┘
start-up, seconds
┏━━━━━━━━━┳━━━━━━━┳━━━━━━━━┳━━━━━━━━━┓
┃ rank    ┃   pid ┃ import ┃ profile ┃
┡━━━━━━━━━╇━━━━━━━╇━━━━━━━━╇━━━━━━━━━┩
│ dp0 tp0 │ 18185 │   4.38 │       - │
│ dp0 tp1 │ 18186 │   4.40 │    0.10 │
└─────────┴───────┴────────┴─────────┘
"""


def run_to_json(stem: Path, *words: str) -> dict[str, Any]:
    assert main([*words, "--out", str(stem)]) == 0
    report: dict[str, Any] = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
    return report


def test_ring_measures_ours_and_the_baselines_by_turns(tmp_path: Path) -> None:
    report = run_to_json(
        tmp_path / "ring", "ring", "--sizes", "64,70000", "--readers", "1,2", "--repetitions", "2", "--messages", "10",
        "--seconds", "0.01", "--idle-readers", "2", "--gaps", "0.001", "--idle-window", "0",
    )  # fmt: skip

    runs = report["runs"]
    assert [cell["system"] for cell in runs[:6]] == ["phalanx", "pipe", "zmq"] * 2
    assert [cell["system"] for cell in runs[6:9]] == ["pipe", "zmq", "phalanx"]
    for cell in runs:
        assert cell["round_trip_p50_us"].keys() == {"64", "70000"}
        assert all(0 < value < 10e6 for value in cell["round_trip_p50_us"].values())
        assert cell["wake_up_p50_us"].keys() == ({"0.001"} if cell["num_readers"] == 2 else set())
    titles = [table["title"] for table in report["tables"]]
    assert titles == ["Round trip in µs, 1 reader", "Round trip in µs, 2 readers", "Wake-up in µs"]
    assert "pyzmq" in report["versions"]


def test_ring_compares_with_ours_cell_by_cell() -> None:
    def cell(system: str, run: int, p50: float) -> CellRun:
        return CellRun(
            run=run,
            system=system,
            num_readers=4,
            round_trip_p50_us={"4096": p50},
            round_trip_p99_us={"4096": 2 * p50},
            wake_up_p50_us={},
            wake_up_max_us={},
            busy_percent=0.5,
            idle_percent=0.1,
        )

    runs = [cell("phalanx", run, 10.0 + run) for run in range(3)] + [
        cell("pipe", run, 44.0) for run in range(3)
    ]
    table, idle = make_tables(runs, ["phalanx", "pipe"])

    assert table.rows == [["4 KiB", "11.0 [10.0-12.0]", "22.0", "44.0", "88.0", "4.0×"]]
    assert table.columns[-1] == "pipe / phalanx"
    assert idle.rows[0] == ["phalanx, 4 readers", "0.500", "0.100"]


def test_a_baseline_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(BenchError, match="No such file"),
        PeerProcess("x", "/no/python", "harness.py.txt", (), env={}),
    ):
        pass
    with (
        pytest.raises(BenchError, match="No module named 'vllm'"),
        PeerProcess("x", __import__("sys").executable, "vllm_scheduler.py.txt", (), env={}),
    ):
        pass


def test_executor_measures_every_number_of_ranks_and_requests(tmp_path: Path) -> None:
    report = run_to_json(
        tmp_path / "executor", "executor", "--ranks", "1,2", "--requests", "1,8", "--steps", "10", "--repetitions", "1",
        "--context-len", "64",
    )  # fmt: skip

    cells = {(run["num_ranks"], run["num_requests"]): run for run in report["runs"]}
    assert cells.keys() == {(1, 1), (1, 8), (2, 1), (2, 8)}
    assert all(run["step_us"]["count"] == 10 for run in report["runs"])
    assert cells[1, 8]["step_bytes"] > cells[1, 1]["step_bytes"] > 0


def test_scheduler_measures_every_number_of_requests_and_context(tmp_path: Path) -> None:
    report = run_to_json(
        tmp_path / "scheduler", "scheduler", "--requests", "1,4", "--context-len", "64", "--context-lens", "128",
        "--growth-requests", "4", "--steps", "20", "--repetitions", "1",
    )  # fmt: skip

    cells = [(run["num_requests"], run["num_context_tokens"]) for run in report["runs"]]
    assert cells == [(1, 64), (4, 64), (4, 128)]
    assert all(run["step_p50_us"] > 0 for run in report["runs"])


def test_decode_steps_hold_one_token_of_every_request_and_grow_their_blocks() -> None:
    steps = decode_steps(3, 30, 40)

    assert len(steps) == 40
    assert all(set(step.num_scheduled_tokens.values()) == {1} for step in steps)
    assert all(len(step.num_scheduled_tokens) == 3 for step in steps)
    assert all(not step.new_requests and not step.removed_request_ids for step in steps)
    num_new_blocks = sum(len(ids) for step in steps for ids in step.new_block_ids.values())
    assert num_new_blocks == 3 * (-(-(30 + 40) // 16) - 2)


def test_startup_reads_the_tables_that_the_launcher_prints() -> None:
    lines = PRINTED.splitlines()

    assert read_table(lines, "processes") == {"dp0": {"pid": 18030.0, "ready after s": 7.71}}
    assert read_table(lines, "start-up, seconds") == {
        "dp0 tp0": {"pid": 18185.0, "import": 4.38},
        "dp0 tp1": {"pid": 18186.0, "import": 4.4, "profile": 0.1},
    }
    assert read_table(lines, "no such table") == {}


def test_startup_tables_hold_every_process_and_phase() -> None:
    runs = [
        StartupRun(
            run=run,
            ready_s=4.0 + run,
            stop_s=0.5,
            memory_bytes=3 << 20,
            processes_s={"dp0": 3.0},
            phases_s={"dp0 tp0": {"import": 2.0, "weights": 1.0}, "dp0 tp1": {"import": 2.0}},
        )
        for run in range(3)
    ]
    whole, phases = make_startup_tables(runs)

    assert whole.rows[0] == ["seconds until ready", "5.00 [4.00-6.00]"]
    assert whole.rows[-1] == ["dp0: seconds from its own start until ready", "3.00"]
    assert phases.columns == ["rank", "import", "weights"]
    assert phases.rows == [["dp0 tp0", "2.00", "1.00"], ["dp0 tp1", "2.00", "-"]]


def test_a_launch_that_fails_is_told_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["startup", "--repetitions", "1", "--", "--tp", "0"]) == 1
    error = capsys.readouterr().err
    assert "cluster-launch ended with 2" in error
    assert "tensor_parallel_size" in error
