"""`cluster-bench sampler` on a CPU, with a small vocabulary."""

from pathlib import Path

import msgspec
import pytest

from phalanx.launch.bench import sampler
from phalanx.launch.bench.cli import main
from phalanx.launch.bench.sampler import Cell


def test_it_times_every_case_and_writes_it_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stem = tmp_path / "result"
    words = ["sampler", "--rows", "1,3", "--vocab", "600", "--repetitions", "2", "--device", "cpu"]

    assert main([*words, "--out", str(stem)]) == 0

    cells = [
        msgspec.convert(run, Cell) for run in msgspec.json.decode(Path(f"{stem}.json").read_bytes())["runs"]
    ]
    ours = [cell for cell in cells if cell.system == sampler.OURS]
    assert {(cell.case, cell.num_rows) for cell in ours} == {(cell.case, cell.num_rows) for cell in cells}
    assert len(ours) == 9 * 2
    assert all(len(cell.us) == 2 and min(cell.us) > 0.0 and not cell.problem for cell in cells)
    assert "top-k 50, top-p 0.9, 3 rows" in capsys.readouterr().out


def test_the_table_marks_what_was_not_inside_a_graph_and_says_why_a_time_is_missing() -> None:
    def cell(system: str, us: list[float], *, is_graph: bool, problem: str = "") -> Cell:
        return Cell(
            case="greedy", system=system, num_rows=2, vocab_size=9, us=us, is_graph=is_graph, problem=problem
        )

    table = sampler.make_table(
        [
            cell("phalanx", [1.0, 2.0, 3.0], is_graph=True),
            cell("other", [8.0], is_graph=False),
            cell("third", [], is_graph=False, problem="no room"),
        ]
    )

    assert table.rows == [["greedy, 2 rows", "2.00 [1.00-3.00]", "8.00*", "no room", "4.00×", ""]]
