"""What whoever started an engine core may ask of it while it serves: pause, sleep, wake, forget prefixes.

Called by: the supervisor sends a `CoreControl` over the lifeline, core_proc.py has it carried out here by the main
thread, between two steps, and answers with a `CoreControlDone`. Over the lifeline, because only the supervisor knows
what all replicas shall do, and an engine core that is started again must be told by the same mouth.

When the engine core dies: no answer comes; the supervisor sees the death.
"""

from enum import StrEnum
from typing import assert_never

import msgspec

from ..workers.hooks import HookOutcome
from ..workers.sleep import SleepLevel
from .core import EngineCore, OutputsByClient


class ControlKind(StrEnum):
    """What an engine core can be asked for."""

    PAUSE = "pause"
    """Begin no step; those under way end, requests keep their place."""
    RESUME = "resume"
    """The end of a pause."""
    SLEEP = "sleep"
    """Give the memory of weights and KV cache back. Requests that are left are aborted."""
    WAKE = "wake"
    """The end of a sleep: weights as before, an empty KV cache."""
    RESET_PREFIX_CACHE = "reset_prefix_cache"
    """Forget all cached prefixes."""


class CoreControl(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do. Answered by the `CoreControlDone` of the same call_id.

    level:     of a SLEEP
    timeout_s: for the workers' part of it
    """

    call_id: int
    kind: ControlKind
    level: SleepLevel = SleepLevel.HOST
    timeout_s: float


class CoreControlDone(msgspec.Struct, frozen=True, kw_only=True):
    """error: one sentence; None when it was done."""

    call_id: int
    error: str | None = None


def carry_out(core: EngineCore, control: CoreControl) -> tuple[CoreControlDone, OutputsByClient]:
    """Do what is asked; return the answer, and the last outputs of requests that it ended.

    Blocks for the steps in flight, and for `timeout_s`. Raises ProcessError when a worker died.
    """
    error: str | None = None
    outputs: OutputsByClient = {}
    match control.kind:
        case ControlKind.PAUSE:
            core.is_paused = True
        case ControlKind.RESUME:
            core.is_paused = False
        case ControlKind.SLEEP:
            outputs = _end_all(core)
            error = _on_all_ranks(core, "sleep", control.level, control.timeout_s)
        case ControlKind.WAKE:
            error = _on_all_ranks(core, "wake", None, control.timeout_s)
        case ControlKind.RESET_PREFIX_CACHE:
            if not core.reset_prefix_cache():
                error = "requests hold blocks; drain the replica first"
        case _:
            assert_never(control.kind)
    return CoreControlDone(call_id=control.call_id, error=error), outputs


def _end_all(core: EngineCore) -> OutputsByClient:
    """Abort what is left, have the steps in flight end, and forget what the KV cache holds."""
    outputs = core.abort_all()
    while core.has_work:
        for client_index, more in core.step().items():
            outputs.setdefault(client_index, []).extend(more)
    core.reset_prefix_cache()
    return outputs


def _on_all_ranks(core: EngineCore, hook: str, argument: object, timeout_s: float) -> str | None:
    """Run a hook on every rank; return what went wrong, rank by rank."""
    outcomes: list[HookOutcome[None]] = core.collective_rpc(hook, argument, timeout_s=timeout_s)
    errors = [f"tp{outcome.tp_rank}: {outcome.error}" for outcome in outcomes if outcome.error is not None]
    return "; ".join(errors) or None
