"""What a benchmark writes down: statistics, machine, tables, files."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.bench.cli import BENCHMARKS, main
from phalanx.launch.bench.machine import read_machine, read_versions
from phalanx.launch.bench.report import ReportWriter, Table, show_number, show_spread
from phalanx.launch.bench.stats import Spread, Summary, over_runs, summarize

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=200))
def test_quantiles_are_numpys(samples: list[float]) -> None:
    summary = summarize(samples)

    expected = np.percentile(samples, [50, 90, 99, 99.9])
    np.testing.assert_allclose(
        [summary.p50, summary.p90, summary.p99, summary.p999], expected, rtol=1e-9, atol=1e-6
    )
    assert (summary.count, summary.min, summary.max) == (len(samples), min(samples), max(samples))
    assert summary.mean == pytest.approx(float(np.mean(samples)), abs=1e-6)


def test_no_samples_are_all_zero() -> None:
    assert summarize([]) == Summary()


def test_numbers_are_shown_with_what_matters() -> None:
    assert [show_number(value) for value in (0.0, 0.1234, 1.234, 12.34, 1234.4, -0.5)] == [
        "0",
        "0.123",
        "1.23",
        "12.3",
        "1234",
        "-0.500",
    ]
    assert over_runs([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)
    assert show_spread(over_runs([3.0, 1.0, 2.0])) == "2.00 [1.00-3.00]"
    assert show_spread(over_runs([2.0, 2.001])) == "2.00"


def test_a_report_says_where_and_how_it_was_measured(tmp_path: Path) -> None:
    table = Table(
        title="Things", columns=["thing", "µs"], rows=[["a", "1"], ["b", "2"]], note="Small is good."
    )
    out = io.StringIO()
    argv = ["ring", "--vllm-python", f"{Path.home()}/x", "--api-key", "k1", "--api-key=k2"]
    ReportWriter(argv, tmp_path / "new" / "2x-cpu.v1").finish(
        benchmark="ring",
        num_runs=3,
        tables=[table],
        runs=[{"a": 1.5}],
        out=out,
        notes=["a note"],
        versions={"peer": "9"},
    )

    page = (tmp_path / "new" / "2x-cpu.v1.md").read_text(encoding="utf-8")
    assert "- command: `cluster-bench ring --vllm-python '~/x' --api-key '***' '--api-key=***'`" in page
    assert "| thing | µs |\n|---|---:|\n| a | 1 |\n| b | 2 |\n" in page
    assert "- a note" in page
    assert "peer 9" in page
    report = json.loads((tmp_path / "new" / "2x-cpu.v1.json").read_bytes())
    assert report["runs"] == [{"a": 1.5}]
    assert report["machine"]["num_cores"] >= 1
    assert "Small is good." in out.getvalue()


def test_the_machine_and_the_versions_are_known() -> None:
    machine = read_machine()
    assert machine.cpu
    assert machine.memory_bytes > 1 << 28
    assert machine.kernel.startswith("Linux")
    assert {"python", "torch", "phalanx"} <= read_versions().keys()


def test_every_benchmark_has_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    names = [benchmark.NAME for benchmark in BENCHMARKS]
    assert len(set(names)) == len(names)
    assert {"serve", "ring", "executor", "scheduler", "failover"} <= set(names)
    for benchmark in BENCHMARKS:
        assert benchmark.NAME in text
        with pytest.raises(SystemExit, match="0"):
            main([benchmark.NAME, "--help"])


@pytest.mark.parametrize(
    "words", [[], ["no-such"], ["ring", "--readers", "0"], ["serve", "--num-requests", "x"]]
)
def test_wrong_arguments_end_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "cluster-bench" in capsys.readouterr().err
