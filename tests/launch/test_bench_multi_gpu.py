"""cluster-bench multi-gpu: how it lays out what it found, and one whole run on CPU ranks."""

import json
from pathlib import Path

import pytest

from phalanx.engine.tokenizer import load_tokenizer
from phalanx.launch.bench.cli import main
from phalanx.launch.bench.multi_gpu import MultiGpuResult, WidthCheck, make_tables
from phalanx.launch.bench.multi_gpu_dp import NUM_WARM_UP, DataParallelRun
from phalanx.launch.bench.multi_gpu_tp import AllReduceRow, RankTiming, _merge
from phalanx.launch.bench.word_tokenizer import with_word_tokenizer
from support.tiny_models import TRAINED


def timing(us: float | None, bits: str = "a", **fields: object) -> RankTiming:
    values = {"way": "nccl", "num_bytes": 4096, "is_exact": True, "problem": "", **fields}
    return RankTiming(us=us, bits=bits, **values)


def test_the_slowest_rank_counts_and_all_must_agree() -> None:
    row = _merge(2, [timing(5.0), timing(7.0, bits="b", is_exact=False)])

    assert (row.us, row.is_exact, row.has_equal_bits) == (7.0, False, False)


def test_a_way_that_one_rank_does_not_have_is_not_had() -> None:
    row = _merge(2, [timing(5.0), timing(None, problem="no peer access")])

    assert (row.us, row.problem) == (None, "no peer access")


def test_tables_say_what_is_wrong_and_what_is_missing() -> None:
    def row(way: str, us: float | None, *, is_equal: bool = True, problem: str = "") -> AllReduceRow:
        return AllReduceRow(
            width=2, way=way, num_bytes=4096, us=us, is_exact=True, has_equal_bits=is_equal, problem=problem
        )

    def served(width: int, rate: float) -> DataParallelRun:
        return DataParallelRun(
            width=width, run=0, output_tokens_per_s=rate, ttft_p50_ms=1.0, num_failed=0, ready_s=2.0
        )

    result = MultiGpuResult(
        checks=[WidthCheck(kind="tp", width=2, num_requests=8, num_equal=7)],
        sums=[row("nccl", 12.0, is_equal=False), row("one-shot", None, problem="no driver")],
        offline={},
        data_parallel=[served(1, 100.0), served(2, 195.0)],
    )

    checks, sums, replicas = make_tables(result)

    assert checks.rows == [["tp 2", "7", "8"]]
    assert sums.rows == [["4 KiB", "12.0 (bits differ)", "-"]]
    assert sums.note == "one-shot: no driver"
    assert [line[2] for line in replicas.rows] == ["1.00×", "1.95×"]


def test_a_folder_without_a_tokenizer_gets_one_of_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(TRAINED / "config.json")

    with with_word_tokenizer(str(tmp_path)) as folder:
        tokenizer = load_tokenizer(folder)
        assert tokenizer.encode("t3 t5") == [3, 5]
    assert not folder.exists()
    with with_word_tokenizer(str(TRAINED)) as folder:
        assert folder == TRAINED.resolve()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_one_run_on_cpu_ranks(tmp_path: Path) -> None:
    stem = tmp_path / "result"
    words = ["multi-gpu", "--model", str(TRAINED), "--device", "cpu", "--workload", "2x8-8"]
    words += ["--sizes", "4096,65536", "--repetitions", "1", "--num-requests", "4", "--concurrency", "4"]
    words += ["--api-servers", "1", "--steps", "5", "--step-requests", "1,2"]
    words += ["--input-len", "16", "--output-len", "8", "--out", str(stem)]

    assert main(words) == 0

    found = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))["runs"]
    assert all(check["num_equal"] == check["num_requests"] for check in found["checks"])
    assert len(found["checks"]) == 4
    assert {row["way"] for row in found["sums"]} == {"as served (shm)", "gloo"}
    assert all(row["is_exact"] and row["has_equal_bits"] and row["us"] > 0 for row in found["sums"])
    assert {(row["width"], row["num_requests"]) for row in found["step_host"]} == {
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    }
    assert [row["num_sums"] for row in found["step_sums"]] == 6 * [0] + 6 * [5]
    assert all(run["num_failed"] == 0 and run["output_tokens_per_s"] > 0 for run in found["data_parallel"])
    for run in found["data_parallel"]:
        assert sum(load["num_requests"] for load in run["replicas"]) == (4 + NUM_WARM_UP) * run["width"]
        assert [load["dp_rank"] for load in run["replicas"]] == list(range(run["width"]))
