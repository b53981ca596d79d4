"""Which cores a rank binds itself to on a host with several memory nodes. Reads sysfs, sets nothing.

Called by: worker_group.py, in the executor's process; the worker binds itself before it imports torch. Memory
follows by itself: a page comes from the node of the thread that touches it first.

On a host with one node, or where sysfs does not say, nobody is bound.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

SYSFS_NODES = Path("/sys/devices/system/node")
SYSFS_PCI = Path("/sys/bus/pci/devices")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
"""One folder for each GPU, named by its PCI address."""


def parse_cpulist(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it: "0-3,8,10-11". Raises ValueError."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def read_numa_nodes(root: Path = SYSFS_NODES) -> dict[int, frozenset[int]]:
    """Return the cores of each node that has any, by node; empty where the kernel does not say."""
    nodes: dict[int, frozenset[int]] = {}
    for folder in root.glob("node[0-9]*"):
        try:
            cpus = parse_cpulist((folder / "cpulist").read_text(encoding="ascii"))
            node = int(folder.name.removeprefix("node"))
        except (OSError, ValueError):
            continue
        if cpus:
            nodes[node] = cpus
    return dict(sorted(nodes.items()))


def read_gpu_nodes(
    visible_devices: str | None, gpus: Path = NVIDIA_GPUS, pci: Path = SYSFS_PCI
) -> list[int | None]:
    """Return the node of each GPU, in the order in which CUDA counts them; None where it is not known.

    visible_devices: CUDA_VISIBLE_DEVICES. Equal GPUs are counted by PCI address, then this list picks. With a list
                     that is not made of numbers (UUIDs, MIG) nothing is known, and the result is empty
    """
    addresses = sorted(folder.name.lower() for folder in gpus.glob("*:*:*.*"))
    if visible_devices is not None:
        try:
            picked = [int(number) for number in visible_devices.split(",") if number.strip()]
        except ValueError:
            return []
        if any(not 0 <= number < len(addresses) for number in picked):
            return []
        addresses = [addresses[number] for number in picked]
    return [_node_of(pci / address) for address in addresses]


def _node_of(device: Path) -> int | None:
    try:
        node = int((device / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def bind_cpu_rank(
    nodes: Mapping[int, AbstractSet[int]], allowed: AbstractSet[int], *, rank: int, num_ranks: int
) -> frozenset[int] | None:
    """Return the cores of CPU rank `rank` of the `num_ranks` on this host; None: it is not bound.

    Ranks take the nodes in turn, neighbours together: with as many ranks as nodes each has one of its own; with
    fewer, each has several; with more, several share one. Only `allowed` cores count.
    """
    usable = [cpus & allowed for cpus in nodes.values() if cpus & allowed]
    if len(usable) < 2:
        return None
    first = rank * len(usable) // num_ranks
    last = max(first + 1, (rank + 1) * len(usable) // num_ranks)
    if last - first == len(usable):
        return None
    return frozenset().union(*usable[first:last])


def bind_gpu_rank(
    nodes: Mapping[int, AbstractSet[int]],
    allowed: AbstractSet[int],
    gpu_nodes: Sequence[int | None],
    *,
    device_index: int,
) -> frozenset[int] | None:
    """Return the cores beside the GPU of that index; None: the rank is not bound."""
    node = gpu_nodes[device_index] if device_index < len(gpu_nodes) else None
    if node is None or len(nodes) < 2:
        return None
    return frozenset(nodes.get(node, frozenset()) & allowed) or None
