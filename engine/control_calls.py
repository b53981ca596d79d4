"""Carries out what an engine core is asked for over its lifeline.

Called by: core_loop.py, in the main thread, between two steps. See core_control.py.
"""

from typing import assert_never

from ..workers.hooks import HookOutcome
from .core import EngineCore, OutputsByClient
from .core_control import ControlKind, CoreControl, CoreControlDone
from .messages import StepOutputs


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
            # Before any rank sleeps, and until all are awake: a request may still be on its way to us.
            core.is_asleep = True
            error = _on_all_ranks(core, "sleep", control.level, control.timeout_s)
        case ControlKind.WAKE:
            error = _on_all_ranks(core, "wake", None, control.timeout_s)
            core.is_asleep = core.is_asleep and error is not None
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
            # No request is left that could get a token.
            outputs.setdefault(client_index, StepOutputs()).others.extend(more.others)
    core.reset_prefix_cache()
    return outputs


def _on_all_ranks(core: EngineCore, hook: str, argument: object, timeout_s: float) -> str | None:
    """Run a hook on every rank; return what went wrong, rank by rank."""
    outcomes: list[HookOutcome[None]] = core.collective_rpc(hook, argument, timeout_s=timeout_s)
    errors = [f"tp{outcome.tp_rank}: {outcome.error}" for outcome in outcomes if outcome.error is not None]
    return "; ".join(errors) or None
