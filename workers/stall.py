"""Which rank holds up a call, and how that is said. Pure but for `describe_child`, which asks the process.

Called by: MultiprocExecutor, when a call has no answer within its budget.
"""

import socket
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from ..shm.process import ChildProcess
from ..shm.stack_dump import is_stopped
from ..shm.status_board import Phase, RankStatus


def find_culprit(statuses: Mapping[int, RankStatus], awaited: AbstractSet[int], call_id: int) -> int:
    """Return the rank that is behind: in the oldest call, not waiting for peers, in the phase that began first.

    statuses: by tp_rank. A rank that is idle after that call holds up nobody.
    """
    busy = {rank for rank, status in statuses.items() if status.phase is not Phase.IDLE}
    behind = {rank for rank, status in statuses.items() if status.call_id < call_id}
    return min(
        busy | behind or awaited,
        key=lambda rank: (
            statuses[rank].call_id,
            statuses[rank].phase is Phase.COLLECTIVE,
            statuses[rank].since_at,
        ),
    )


def describe_status(status: RankStatus, now: float) -> str:
    """Say what one rank has been doing, and for how long."""
    step = f" (step {status.step})" if status.step else ""
    return f"{status.phase} of call {status.call_id}{step} for {now - status.since_at:.1f} s"


def describe_ranks(
    statuses: Mapping[int, RankStatus], culprit: int, call_id: int, now: float, *, is_stopped: bool
) -> str:
    """Say in one sentence who does not answer a call, and what the others do."""
    text = f"call {call_id} has no answer: {describe_status(statuses[culprit], now)}"
    if is_stopped:
        text += ", stopped by a signal"
    others = "; ".join(
        f"tp{rank} {describe_status(status, now)}" for rank, status in statuses.items() if rank != culprit
    )
    return f"{text} (the others: {others})" if others else text


def describe_child(child: ChildProcess, doing: str) -> str:
    """Say who a process is, what it does, and where its threads stand. Blocks up to a second, for its stacks."""
    state = ", stopped by a signal" if is_stopped(child.pid) else ""
    return f"{child.role} host={socket.gethostname()} pid={child.pid}: {doing}{state}\n{child.stack()}"
