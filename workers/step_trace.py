"""The hooks "begin_step_trace" and "end_step_trace": a timeline of the steps between them, for Perfetto.

Called by: hooks.py in the worker process, on the thread that runs the steps (executor.hooks names them). Built on
torch.profiler: what the host called, and on a GPU every kernel with its launch. A process has one profiler, so ranks
that share a process cannot be traced.
"""

from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile


class Traceable(Protocol):
    """A worker that keeps its recorder. recorder: None while nothing is recorded."""

    recorder: profile | None

    @property
    def tp_rank(self) -> int:
        """Which rank it is."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...


def begin_step_trace(worker: Traceable, argument: None) -> None:
    """Begin to record. Raises RuntimeError when a record is running already."""
    if worker.recorder is not None:
        raise RuntimeError("a trace is being recorded already")
    activities = [ProfilerActivity.CPU]
    if worker.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    recorder = profile(activities=activities)
    recorder.start()
    worker.recorder = recorder


def end_step_trace(worker: Traceable, argument: str) -> str:
    """Write what was recorded to the file `argument`, gzipped when it ends in .gz; return its path.

    Rank 0 alone writes, the others return "". Raises RuntimeError when nothing is being recorded, OSError.
    """
    recorder, worker.recorder = worker.recorder, None
    if recorder is None:
        raise RuntimeError("no trace is being recorded")
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)
    recorder.stop()
    if worker.tp_rank != 0:
        return ""
    recorder.export_chrome_trace(argument)
    return argument
