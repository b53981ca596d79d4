"""The hooks "sleep" and "wake": a rank gives the memory of its weights and its KV cache back, and takes it again.

Called by: hooks.py, in the worker process, between two steps, while the replica has no request. Torch-free.
Both may be called again: what is done already is left as it is.
"""

from enum import IntEnum
from typing import Protocol


class SleepLevel(IntEnum):
    """What becomes of the weights of a rank that sleeps; its KV cache is dropped at any level."""

    HOST = 1
    """They move to the host's memory: waking up copies them back. On CPU they stay where they are."""
    DROP = 2
    """They are dropped: waking up reads the checkpoint again."""


class Sleeper(Protocol):
    """A worker that can give its memory back."""

    def sleep(self, level: SleepLevel) -> None:
        """Give the memory back."""
        ...

    def wake(self) -> None:
        """Take the memory again. Raises DeviceMemoryError, WeightsError."""
        ...


def sleep(worker: Sleeper, argument: SleepLevel) -> None:
    """Have one rank sleep."""
    worker.sleep(argument)


def wake(worker: Sleeper, argument: None) -> None:
    """Wake one rank up."""
    worker.wake()
