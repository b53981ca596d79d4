"""Hooks that the tests name in `executor.hooks`; they run in worker processes."""

import os
import threading
from typing import TYPE_CHECKING

import msgspec

from phalanx.workers.worker_loop import WorkerLike

if TYPE_CHECKING:
    from phalanx.workers.worker import Worker


class Fraction(msgspec.Struct, frozen=True):
    numerator: float
    denominator: float


class Quotient(msgspec.Struct, frozen=True):
    tp_rank: int
    quotient: float


def divide(worker: WorkerLike, argument: Fraction) -> Quotient:
    return Quotient(tp_rank=worker.tp_rank, quotient=argument.numerator / argument.denominator)


def fail_on(worker: WorkerLike, argument: int) -> int:
    """Raise on one rank, return its number on the others."""
    if worker.tp_rank == argument:
        raise ValueError(f"rank {argument} was asked to fail")
    return worker.tp_rank


def variables(worker: WorkerLike, argument: list[str]) -> list[str | None]:
    """Values of environment variables, by their names."""
    return [os.environ.get(name) for name in argument]


def unspeakable(worker: WorkerLike, argument: None) -> object:
    return threading.Lock()


def nap(worker: WorkerLike, argument: float) -> int:
    """Take long."""
    threading.Event().wait(argument)
    return worker.tp_rank


def norm_of(worker: "Worker", argument: str) -> float:
    """Return the norm of this rank's part of a parameter."""
    return float(dict(worker.model.named_parameters())[argument].norm())


def cores(worker: WorkerLike, argument: None) -> list[int]:
    return sorted(os.sched_getaffinity(0))
