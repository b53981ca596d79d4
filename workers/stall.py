"""Which rank holds up a call, and how that is said.

Called by: MultiprocExecutor, when a call has no answer within its budget. Pure, but for `describe_child` and
`describe_stall`, which ask the processes.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..shm.process import ChildProcess
from ..shm.stack_dump import is_stopped
from ..shm.status_board import Phase, RankStatus


def find_suspects(
    statuses: Mapping[int, RankStatus],
    awaited: AbstractSet[int],
    call_id: int,
    stopped: AbstractSet[int] = frozenset(),
) -> list[int]:
    """Return the ranks that are not done with a call, the one that holds it up first.

    That one was stopped by a signal; else it is in the oldest call, not waiting for peers, in the phase that began
    first. When all seem to be done, those that must answer are to blame. statuses: by tp_rank.
    """
    busy = {rank for rank, status in statuses.items() if status.phase is not Phase.IDLE}
    behind = {rank for rank, status in statuses.items() if status.call_id < call_id}
    return sorted(
        busy | behind or awaited,
        key=lambda rank: (
            rank not in stopped,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A call that takes long.

    culprit:  tp_rank of who holds it up; sentence: what all ranks do
    stacks:   who is not done with it, and where their threads stand
    """

    culprit: int
    sentence: str
    stacks: str


def describe_stall(
    children: Sequence[ChildProcess], ranks: Sequence[RankStatus], awaited: AbstractSet[int], call_id: int
) -> Stall:
    """Find out why a call has no answer. children, ranks: by tp_rank. Blocks up to a second for each suspect."""
    statuses = dict(enumerate(ranks))
    stopped = {rank for rank, child in enumerate(children) if is_stopped(child.pid)}
    suspects = find_suspects(statuses, awaited, call_id, stopped)
    culprit = suspects[0]
    now = time.monotonic()
    sentence = describe_ranks(statuses, culprit, call_id, now, is_stopped=culprit in stopped)
    stacks = [describe_child(children[rank], describe_status(statuses[rank], now)) for rank in suspects]
    return Stall(culprit=culprit, sentence=sentence, stacks="\n".join(stacks))
