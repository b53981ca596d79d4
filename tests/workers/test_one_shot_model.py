"""The protocol of the one-shot all-reduce over all its interleavings on a weak machine; and without each of its parts.

What kernels/triton_all_reduce.py does for one piece, step for step. A GPU's memory is weaker still in one point that
no program here depends on: two other threads may see two threads' stores in different orders.
"""

import pytest

from support.memory_model import (
    Check,
    Jump,
    Label,
    Load,
    Machine,
    Operation,
    Program,
    Store,
    Violation,
    explore,
)

PARTS = ("release", "acquire", "two halves", "waits", "tells last")


def rank_program(rank: int, *, num_ranks: int, num_calls: int, without: frozenset[str]) -> Program:
    """Sum `num_calls` times; in each call every rank's number is that of the call."""
    program: list[Operation] = []
    peers = [peer for peer in range(num_ranks) if peer != rank]
    for call in range(1, num_calls + 1):
        half = 0 if "two halves" in without else call & 1
        copy_in: list[Operation] = [Store(f"data{rank}.{half}", call)]
        tell: list[Operation] = [
            Store(f"flag{peer}.{rank}", call, release="release" not in without) for peer in peers
        ]
        program += [*tell, *copy_in] if "tells last" in without else [*copy_in, *tell]
        for peer in peers:
            if "waits" in without:
                break
            here = f"{call} heard {peer}"
            program += [
                Label(f"{here}?"),
                Load("flag", f"flag{rank}.{peer}", acquire="acquire" not in without),
                Jump(here, ("flag",), lambda registers, call=call: registers["flag"] >= call),
                Jump(f"{here}?", (), lambda _: True),
                Label(here),
            ]
        for peer in peers:
            program += [
                Load("theirs", f"data{peer}.{half}"),
                Check(
                    f"call {call} sums its own numbers",
                    ("theirs",),
                    lambda registers, call=call: registers["theirs"] == call,
                ),
            ]
    return program


def programs(num_ranks: int, num_calls: int, *without: str) -> list[Program]:
    return [
        rank_program(rank, num_ranks=num_ranks, num_calls=num_calls, without=frozenset(without))
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("machine", Machine)
@pytest.mark.parametrize(("num_ranks", "num_calls"), [(2, 3), pytest.param(3, 2, marks=pytest.mark.full)])
def test_every_interleaving_sums_what_belongs_together(
    num_ranks: int, num_calls: int, machine: Machine
) -> None:
    assert explore(programs(num_ranks, num_calls), machine) > 100


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_needed(part: str) -> None:
    with pytest.raises(Violation):
        explore(programs(2, 3, part), Machine.ARM)
