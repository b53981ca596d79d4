"""Faults inside real workers (faults.py): named in `executor.hooks`, so that every worker imports it.

A token that kills whoever computes it needs to be asked for by nobody.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.workers.shm_group import ShmGroup
from phalanx.workers.worker import Worker
from phalanx.workers.worker_loop import WorkerLike
from support.faults import EXIT_STATUS, perhaps_fail

HOOK = "support.worker_faults:with_faults"
POISON_TOKEN_ID = 509
MOMENTS = ("prefill", "decode", "collective")


def with_faults(worker: WorkerLike, argument: None) -> None:
    """Nothing: that this module is imported is all that is wanted."""


def _perhaps(moment: str) -> None:
    role = Path("/proc/self/cmdline").read_text().rstrip("\0").removeprefix("phalanx ")
    perhaps_fail(role, moment)


def _wrap_begin_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def begin_step(self: Worker, scheduled: Any, *rest: Any) -> Any:
        if any(POISON_TOKEN_ID in new.token_ids for new in scheduled.new_requests):
            os._exit(EXIT_STATUS)
        _perhaps("prefill" if scheduled.new_requests else "decode")
        return original(self, scheduled, *rest)

    return begin_step


def _wrap_all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(self: ShmGroup, x: Any) -> Any:
        _perhaps("collective")
        return original(self, x)

    return all_reduce


# In worker processes only: the tests themselves import this module for its names.
if Path("/proc/self/cmdline").read_text().startswith("phalanx "):
    Worker.begin_step = _wrap_begin_step(Worker.begin_step)  # type: ignore[method-assign]
    ShmGroup.all_reduce = _wrap_all_reduce(ShmGroup.all_reduce)  # type: ignore[method-assign]
