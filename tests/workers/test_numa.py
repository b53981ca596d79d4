"""Cores of ranks, from a tree of files like sysfs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.workers.numa import (
    bind_cpu_rank,
    bind_gpu_rank,
    parse_cpulist,
    read_gpu_nodes,
    read_numa_nodes,
)

TWO_NODES = {0: frozenset(range(0, 4)), 1: frozenset(range(4, 8))}
ALL = frozenset(range(8))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_gpus(folder: Path, nodes: dict[str, str]) -> tuple[Path, Path]:
    """Make the two trees of GPUs at these PCI addresses; return them."""
    for address, node in nodes.items():
        write(folder / "gpus" / address / "information", "")
        write(folder / "pci" / address / "numa_node", node)
    return folder / "gpus", folder / "pci"


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("5", {5}),
        ("\n", set()),
    ],
)
def test_a_list_of_cores_is_read_as_the_kernel_writes_it(text: str, cpus: set[int]) -> None:
    assert parse_cpulist(text) == cpus


@given(st.sets(st.integers(0, 300), min_size=1))
def test_any_list_of_cores_comes_back(cpus: set[int]) -> None:
    assert parse_cpulist(",".join(f"{cpu}-{cpu}" if cpu % 2 else str(cpu) for cpu in cpus)) == cpus


def test_nodes_are_read_in_order_and_those_without_cores_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "node10" / "cpulist", "8-9\n")
    write(tmp_path / "node1" / "cpulist", "4-7\n")
    write(tmp_path / "node0" / "cpulist", "0-3\n")
    write(tmp_path / "node2" / "cpulist", "\n")
    write(tmp_path / "node3" / "meminfo", "")
    write(tmp_path / "online", "0-2\n")

    assert list(read_numa_nodes(tmp_path).items()) == [
        (0, frozenset(range(4))),
        (1, frozenset(range(4, 8))),
        (10, frozenset((8, 9))),
    ]
    assert read_numa_nodes(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, [None]),
        (2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (4, [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}]),
    ],
)
def test_ranks_take_the_nodes_in_turn(num_ranks: int, expected: list[set[int] | None]) -> None:
    bound = [bind_cpu_rank(TWO_NODES, ALL, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]

    assert bound == expected


def test_fewer_ranks_than_nodes_take_several_each() -> None:
    nodes = {node: frozenset((node,)) for node in range(4)}

    assert bind_cpu_rank(nodes, frozenset(range(4)), rank=1, num_ranks=2) == {2, 3}


def test_nobody_is_bound_on_one_node_or_when_one_is_allowed() -> None:
    assert bind_cpu_rank({0: ALL}, ALL, rank=0, num_ranks=2) is None
    assert bind_cpu_rank({}, ALL, rank=0, num_ranks=2) is None
    assert bind_cpu_rank(TWO_NODES, frozenset((1, 2)), rank=0, num_ranks=2) is None


@given(st.integers(1, 9), st.integers(1, 20), st.sets(st.integers(0, 26), min_size=1))
def test_every_rank_gets_allowed_cores_and_no_core_is_left_idle(
    num_nodes: int, num_ranks: int, allowed: set[int]
) -> None:
    nodes = {node: frozenset(range(3 * node, 3 * node + 3)) for node in range(num_nodes)}
    bound = [bind_cpu_rank(nodes, allowed, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]

    assert all(cpus is None or (cpus and cpus <= allowed) for cpus in bound)
    if None not in bound:
        of_nodes = frozenset().union(*nodes.values()) & allowed
        assert frozenset().union(*(cpus for cpus in bound if cpus is not None)) == of_nodes


def test_a_gpu_rank_is_bound_beside_its_gpu(tmp_path: Path) -> None:
    trees = write_gpus(tmp_path, {"0000:1a:00.0": "1\n", "0000:0a:00.0": "0\n", "0000:2a:00.0": "-1\n"})
    gpu_nodes = read_gpu_nodes(None, *trees)

    assert gpu_nodes == [0, 1, None]
    assert bind_gpu_rank(TWO_NODES, ALL, gpu_nodes, device_index=1) == {4, 5, 6, 7}
    assert bind_gpu_rank(TWO_NODES, ALL, gpu_nodes, device_index=2) is None
    assert bind_gpu_rank(TWO_NODES, ALL, gpu_nodes, device_index=3) is None
    assert bind_gpu_rank(TWO_NODES, frozenset((0,)), gpu_nodes, device_index=1) is None
    assert bind_gpu_rank({0: ALL}, ALL, gpu_nodes, device_index=0) is None


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("1,0", [1, 0]), ("1", [1]), ("", []), ("GPU-4f1c", []), ("7", [])],
)
def test_visible_devices_pick_the_gpus(tmp_path: Path, visible: str, expected: list[int]) -> None:
    trees = write_gpus(tmp_path, {"0000:1a:00.0": "1\n", "0000:0a:00.0": "0\n"})

    assert read_gpu_nodes(visible, *trees) == expected
