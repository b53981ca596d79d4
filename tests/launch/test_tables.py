"""Tables of ranks and phases."""

import io

from phalanx.cluster.observer import ProcessReport
from phalanx.cluster.placement import make_plan
from phalanx.launch.tables import (
    memory_table,
    plan_table,
    print_tables,
    processes_table,
    ranks_table,
    startup_table,
)
from phalanx.shm.segment import SegmentPlan
from phalanx.workers.config import DeviceType, ExecutorConfig, ParallelConfig
from phalanx.workers.messages import ExecutorReport, PhaseTime, RankReport
from phalanx.workers.worker_group import planned_segments


def make_report(tp_rank: int) -> RankReport:
    return RankReport(
        tp_rank=tp_rank,
        pid=100 + tp_rank,
        device="cpu",
        device_name="a chip",
        dtype="float32",
        attention_backend="torch",
        weight_bytes=3 << 20,
        kv_bytes_per_block=1 << 20,
        num_kv_blocks=50 + tp_rank,
        num_threads=1,
        phases=[PhaseTime("import", 1.25), PhaseTime("weights", 0.5), PhaseTime("weights", 0.25)],
    )


def make_executor() -> ExecutorReport:
    ranks = [make_report(1), make_report(0)]
    return ExecutorReport(num_kv_blocks=50, block_size=16, max_model_len=64, vocab_size=64, ranks=ranks)


def lines(*tables: object) -> list[list[str]]:
    file = io.StringIO()
    print_tables(list(tables), file)  # type: ignore[arg-type]
    rows = [line for line in file.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_the_plan_names_every_rank_and_its_device() -> None:
    plan = make_plan(
        data_parallel_size=2, tensor_parallel_size=2, device=DeviceType.CUDA, num_devices=4, num_cores=8
    )

    rows = lines(plan_table(plan))

    assert [(row[0], row[2]) for row in rows] == [
        ("dp0 tp0", "cuda:0"),
        ("dp0 tp1", "cuda:1"),
        ("dp1 tp0", "cuda:2"),
        ("dp1 tp1", "cuda:3"),
    ]


def test_the_plan_of_shared_memory_adds_up_like_segments() -> None:
    config = ExecutorConfig(request_ring_bytes=4 << 20, reply_ring_bytes=1 << 20)
    parallel = ParallelConfig(tensor_parallel_size=2, device=DeviceType.CUDA)
    segments = [
        segment for replica in ("dp0", "dp1") for segment in planned_segments(config, parallel, replica)
    ]

    rows = lines(memory_table(SegmentPlan(segments=tuple(segments))))

    assert rows == [["requests", "2", "8.00"], ["replies", "4", "4.00"], ["all", "6", "12.00"]]


def test_the_start_table_adds_up_phases_and_orders_ranks() -> None:
    rows = lines(startup_table({1: make_executor(), 0: make_executor()}))

    assert [row[0] for row in rows] == ["dp0 tp0", "dp0 tp1", "dp1 tp0", "dp1 tp1"]
    assert rows[0] == ["dp0 tp0", "100", "1.25", "-", "-", "0.75", "-", "-", "-", "2.00"]


def test_of_phases_that_go_on_at_the_same_time_the_longer_one_counts() -> None:
    executor = make_executor()
    for report in executor.ranks:
        report.phases.append(PhaseTime("kernels", 3.0))
        report.phases.append(PhaseTime("KV cache", 1.5))
        report.phases.append(PhaseTime("CUDA graphs", 1.25))

    rows = lines(startup_table({0: executor}))

    # The graphs are a part of what comes with the KV cache.
    assert rows[0][-5:] == ["0.75", "3.00", "-", "1.50", "5.75"]


def test_the_ranks_table_shows_the_blocks_that_the_replica_uses() -> None:
    rows = lines(ranks_table({0: make_executor()}))

    assert rows[1] == ["dp0 tp1", "cpu a chip", "float32", "torch", "none", "101", "3.0", "50", "50.0", "1"]


def test_the_table_of_processes_shows_how_long_each_took() -> None:
    assert lines(processes_table([ProcessReport(role="api0", pid=7, ready_after_s=0.5)])) == [
        ["api0", "7", "0.50"]
    ]
