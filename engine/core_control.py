"""What whoever started an engine core tells it while it serves: to pause, sleep, wake, forget; that a front end died.

Called by: the supervisor sends a `CoreControl` over the lifeline; core_loop.py has it carried out (control_calls.py)
and answers with a `CoreControlDone`. A `FrontEndGone` comes the same way (cluster/front_ends.py), and is not answered.
Over the lifeline, because only the supervisor knows what all replicas shall do and who has died, and an engine core
that is started again must be told by the same mouth.

When the engine core dies: no answer comes; the supervisor sees the death.
"""

from enum import StrEnum

import msgspec

from ..workers.sleep import SleepLevel


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


class CoreControl(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One thing to do. Answered by the `CoreControlDone` of the same call_id.

    level:     of a SLEEP
    timeout_s: for the workers' part of it
    """

    call_id: int
    kind: ControlKind
    level: SleepLevel = SleepLevel.HOST
    timeout_s: float


class FrontEndGone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process of a front end has ended: nobody waits for what it asked. Not answered."""

    client_index: int
    incarnation: int


FromParent = CoreControl | FrontEndGone


class CoreControlDone(msgspec.Struct, frozen=True, kw_only=True):
    """error: one sentence; None when it was done."""

    call_id: int
    error: str | None = None
