"""A step that was launched and whose tokens are on their way to the host.

Called by: the model runner makes it; the Worker or UniprocExecutor waits for it, on the same thread, in the order of
the steps. Whatever the device failed at since is raised by the wait.
"""

from collections.abc import Callable
from typing import Protocol

from .messages import ModelRunnerOutput


class StepInFlight(Protocol):
    """See the module."""

    @property
    def is_done(self) -> bool:
        """True when `wait` returns at once."""
        ...

    def wait(self) -> ModelRunnerOutput:
        """Block until the device is done with the step, and return what it sampled. Again returns the same."""
        ...


class FinishedStep:
    """A step that is back already, or had nothing to compute."""

    is_done = True

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def wait(self) -> ModelRunnerOutput:
        return self._output


class Arrival(Protocol):
    """Tensors on their way to the host: HostCopy, StepCopy."""

    @property
    def is_done(self) -> bool: ...


class LaunchedStep:
    """A step whose results arrive.

    finish: waits for the arrival and makes the step's output of it; called once
    """

    def __init__(self, arrival: Arrival, finish: Callable[[], ModelRunnerOutput]) -> None:
        self._arrival = arrival
        self._finish: Callable[[], ModelRunnerOutput] | None = finish
        self._output: ModelRunnerOutput | None = None

    @property
    def is_done(self) -> bool:
        return self._output is not None or self._arrival.is_done

    def wait(self) -> ModelRunnerOutput:
        if self._output is None:
            assert self._finish is not None
            self._output = self._finish()
            self._finish = None
        return self._output
