"""What a result must say of where it was measured: the machine, the versions, the commit.

Called by: report.py, in the process of the benchmark, once. Reads files of the kernel and asks git; torch is not
imported, its version comes from its metadata.
"""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import msgspec

from ... import __version__

_PACKAGES = ("torch", "msgspec", "pyzmq", "numpy")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a benchmark ran.

    num_cores:    that this process may use
    memory_bytes: of the host
    gpus:         model names, as the driver says
    load:         average number of runnable processes of the last minute, when the benchmark began: more than a
                  little means that others used the machine too
    """

    cpu: str
    num_cores: int
    memory_bytes: int
    kernel: str
    gpus: list[str]
    load: float


def read_machine() -> Machine:
    """Describe this machine."""
    return Machine(
        cpu=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=f"{platform.system()} {platform.release()}",
        gpus=_gpu_models(),
        load=os.getloadavg()[0],
    )


def read_versions() -> dict[str, str]:
    """Name the versions that may change a result: Python, packages, the commit of this project."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions["phalanx"] = _commit(Path(__file__).resolve().parent) or __version__
    return versions


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _gpu_models() -> list[str]:
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Model":
                models.append(value.strip())
    return models


def _commit(folder: Path) -> str | None:
    """Return the checkout's commit, marked when files differ from it; None outside a checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30.0)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
