"""Times of another program for the same workloads, from a file, to show a ratio.

Called by: the offline benchmarks. The files in peers/ say where their numbers come from.
"""

from pathlib import Path

import msgspec

from .errors import BenchError


class ReferenceRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One workload on one model. model: name of the model's folder; wall_s: for all requests together."""

    model: str
    workload: str
    wall_s: float


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured of `program`. source: how, and on what machine, in words."""

    program: str
    source: str
    runs: list[ReferenceRun]

    def find(self, model: str, workload: str) -> ReferenceRun | None:
        """Return the run of this model and workload; None when it was not measured."""
        for run in self.runs:
            if (run.model, run.workload) == (model, workload):
                return run
        return None


def read_reference(path: Path) -> Reference:
    """Read a file. Raises BenchError when it is none, OSError when it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Reference)
    except msgspec.MsgspecError as error:
        raise BenchError(f"{path} is not a reference file: {error}") from None
