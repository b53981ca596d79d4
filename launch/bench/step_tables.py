"""How `cluster-bench multi-gpu` shows what it measured step by step. Pure.

Called by: multi_gpu.py.
"""

from collections.abc import Sequence

from .report import Table, show_number
from .stats import Summary
from .step_rows import HostRow, SumRow


def make_tables(sums: Sequence[SumRow], host: Sequence[HostRow]) -> list[Table]:
    """Lay out sums and the executor's share; a width of one rank has no sums, and stands there for its busy time."""
    return [
        Table(
            title="Sums over the ranks within a step, µs",
            columns=[
                *("width, running, step", "tokens", "sums", "in sums", "without waiting", "a layer"),
                *("overlap", "by way (sums: µs, without waiting)", "gathers", "device busy"),
            ],
            rows=[_sum_cells(row) for row in sums],
            note="In sums: mean over the ranks, waits for slower ranks included; without waiting: sum by sum the rank "
            "that waited least. Overlap: part of it while other kernels ran on the device. On a GPU recorded by a "
            "profiler, which slows the host; gathers and busy are means over all steps of a record.",
        ),
        Table(
            title="A decode step beside the ranks: each waited for, µs, median (p99)",
            columns=[
                *("width, running", "send", "encode of it", "until the last rank has it", "decode of it"),
                *("reply", "in all", "whole step"),
            ],
            rows=[
                [
                    _load(row),
                    _both(row.alone.send),
                    _both(row.encode),
                    _both(row.alone.reach),
                    _both(row.decode),
                    _both(row.alone.reply),
                    _both(row.alone.overhead),
                    _both(row.alone.step),
                ]
                for row in host
            ],
            note="Send: encoded and published. Until the last rank has it decoded: from the submission on. In all: "
            "what is not rank 0's own work. Encode and decode: the same frames again, in the benchmark's process.",
        ),
        Table(
            title="What steps in flight hide, µs, median (p99)",
            columns=["width, running", "step", "device", "device idle before it", "hidden"],
            rows=[
                [
                    _load(row),
                    _both(row.step_us),
                    _both(row.device_us),
                    _both(row.idle_us),
                    "-" if row.hidden is None else f"{row.hidden:.0%}",
                ]
                for row in host
            ],
            note="Hidden: part of what a step that is waited for takes beside the device.",
        ),
    ]


def _sum_cells(row: SumRow) -> list[str]:
    name = f"{_load(row)}, {row.kind}"
    if row.problem:
        return [f"{name}: {row.problem}", *["-"] * 9]
    ways = (
        f"{way} {one.num_sums:g}: {show_number(one.us)}, {show_number(one.least_us)}"
        for way, one in row.ways.items()
    )
    return [
        name,
        f"{row.num_tokens:g}",
        str(row.num_sums),
        show_number(row.us),
        show_number(row.least_us),
        show_number(row.layer_us),
        f"{row.overlap:.1%}",
        "; ".join(ways) or "-",
        show_number(row.gather_us),
        show_number(row.busy_us),
    ]


def _load(row: SumRow | HostRow) -> str:
    return f"tp {row.width}, {row.num_requests}"


def _both(summary: Summary) -> str:
    return f"{show_number(summary.p50)} ({show_number(summary.p99)})"
