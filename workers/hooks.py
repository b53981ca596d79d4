"""Hooks: functions that run on every rank between two steps, by name. The registry is closed.

Called by: worker_loop.py and UniprocExecutor run them; the executors look names up before they send anything.
A hook is one of the built-in ones below, or one that the configuration names ("module:function"); that is
imported in the worker, by its name. No code crosses a process border, only msgpack of the hook's own types:

    def hottest_layer(worker: Worker, argument: Window) -> Heat: ...

Its argument has the type of the second parameter's annotation, and whatever msgpack can carry is its result.
An error in a hook ends the call, not the replica. A hook that changes weights or cache is on its own.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from ..shm.errors import ConfigError
from .calls import HookDone, WorkerFailure
from .memory_report import memory_report
from .sleep import sleep, wake

T = TypeVar("T")

HookFunction = Callable[[Any, Any], object]
"""(worker, argument) -> result"""

BUILT_IN_HOOKS: Mapping[str, HookFunction] = MappingProxyType(
    {"memory_report": memory_report, "sleep": sleep, "wake": wake}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HookOutcome(Generic[T]):
    """What a hook came to on one rank.

    error: one sentence, None when all went well; traceback: of the rank, when it was the hook that failed
    """

    tp_rank: int
    result: T | None = None
    error: str | None = None
    traceback: str = ""


def check_hook_name(name: str, configured: Sequence[str]) -> None:
    """Raise ValueError, which lists the known ones, when there is no hook of that name."""
    known = [*BUILT_IN_HOOKS, *(_short_name(entry) for entry in configured)]
    if name not in known:
        raise ValueError(
            f"there is no hook {name!r}; known are {', '.join(known)} (executor.hooks adds more)"
        )


def encode_argument(argument: object) -> bytes:
    """Return a hook's argument as it travels. Raises TypeError when msgpack cannot carry it."""
    return msgspec.msgpack.encode(argument)


def hook_outcome(
    tp_rank: int, answer: object, timeout_s: float, result_type: type[T] | None
) -> HookOutcome[T]:
    """Say what a hook came to on one rank.

    answer: of the rank, None when none came within `timeout_s`
    """
    match answer:
        case HookDone():
            try:
                result = msgspec.msgpack.decode(
                    answer.result, type=Any if result_type is None else result_type
                )
            except msgspec.MsgspecError as error:
                return HookOutcome(tp_rank=tp_rank, error=f"the result is no {result_type}: {error}")
            return HookOutcome(tp_rank=tp_rank, result=result)
        case WorkerFailure():
            return HookOutcome(tp_rank=tp_rank, error=answer.error, traceback=answer.traceback)
        case _:
            return HookOutcome(tp_rank=tp_rank, error=f"no answer within {timeout_s:g} s")


class HookRegistry:
    """The hooks of one worker.

    entries: "module:function" of those beyond the built-in ones; each is known by the function's name
    Raises ConfigError (executor.hooks) when one cannot be imported.
    """

    def __init__(self, entries: Sequence[str] = ()) -> None:
        self._hooks = {
            name: (function, _argument_type(function)) for name, function in BUILT_IN_HOOKS.items()
        }
        for entry in entries:
            name = _short_name(entry)
            if name in self._hooks:
                raise ConfigError("executor.hooks", f"there is a hook of the name {name} already")
            function = _load(entry)
            self._hooks[name] = (function, _argument_type(function))

    def run(self, worker: object, name: str, argument: bytes) -> bytes:
        """Run a hook on this rank, and return its result as it travels.

        Raises whatever the hook raises; LookupError for an unknown name, msgspec.MsgspecError for a wrong argument,
        TypeError for a result that msgpack cannot carry.
        """
        function, argument_type = self._hooks[name]
        return msgspec.msgpack.encode(function(worker, msgspec.msgpack.decode(argument, type=argument_type)))


def _short_name(entry: str) -> str:
    return entry.partition(":")[2]


def _load(entry: str) -> HookFunction:
    module, _, name = entry.partition(":")
    try:
        function: HookFunction = getattr(importlib.import_module(module), name)
    # Importing runs the user's code, which may raise anything.
    except Exception as error:
        raise ConfigError("executor.hooks", f"{entry} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError("executor.hooks", f"{entry} is not a function")
    return function


def _argument_type(function: HookFunction) -> Any:
    """Return the annotation of the second parameter; Any when there is none."""
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 2:
        raise ConfigError("executor.hooks", f"{function!r} must take two arguments: the worker, and its own")
    annotation = parameters[1].annotation
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        return get_type_hints(function)[parameters[1].name]
    except NameError as error:
        raise ConfigError(
            "executor.hooks", f"an annotation of {function!r} does not resolve: {error}"
        ) from error
