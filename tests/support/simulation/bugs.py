"""Bugs to plant into the real parts, one at a time: a simulator that does not find them proves nothing.

Each is one that somebody might write: a forgotten case, a missing comparison, a message not sent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from phalanx.cluster.dp_client import DpClient
from phalanx.cluster.load_table import LoadTable
from phalanx.cluster.messages import FleetUpdate, ReplicaState
from phalanx.cluster.replay import ReplayLog
from phalanx.cluster.supervision import ChildExited, Event, PublishFleet, Supervision, Tick
from phalanx.cluster.suspects import Suspects, TrackedRequest, fingerprint
from phalanx.engine.core_control import FrontEndGone
from phalanx.engine.core_loop import EngineCoreLoop
from phalanx.engine.messages import (
    ClientHello,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineStats,
    StepOutputs,
)

from ..step_outputs import write_out

Patch = Callable[[], Any]


def outputs_of_older_attempts_are_taken() -> Any:
    original = ReplayLog.accept

    def accept(self: ReplayLog, outputs: StepOutputs) -> StepOutputs:
        others = [_as_newest_attempt(self, output) for output in outputs.others]
        return original(self, msgspec.structs.replace(outputs, others=others))

    return patch.object(ReplayLog, "accept", accept)


def tokens_of_older_attempts_are_taken() -> Any:
    original = ReplayLog.accept

    def accept(self: ReplayLog, outputs: StepOutputs) -> StepOutputs:
        plain = write_out(msgspec.structs.replace(outputs, others=[]))
        taken = [_as_newest_attempt(self, output) for output in plain]
        return original(self, StepOutputs(others=taken + outputs.others))

    return patch.object(ReplayLog, "accept", accept)


def _as_newest_attempt(log: ReplayLog, output: EngineCoreOutput) -> EngineCoreOutput:
    entry = log._entries.get(output.request_id)
    return output if entry is None else msgspec.structs.replace(output, attempt=entry.attempt)


def a_replay_begins_at_the_prompt() -> Any:
    original = ReplayLog.replayable

    def replayable(self: ReplayLog) -> list[EngineCoreRequest]:
        return [msgspec.structs.replace(request, output_token_ids=[]) for request in original(self)]

    return patch.object(ReplayLog, "replayable", replayable)


def a_replay_is_sent_as_the_same_attempt() -> Any:
    original = ReplayLog.lose

    def lose(self: ReplayLog, dp_rank: int, now: float) -> list[EngineCoreOutput]:
        lost = [entry for entry in self._entries.values() if entry.dp_rank == dp_rank]
        outputs = original(self, dp_rank, now)
        for entry in lost:
            entry.attempt -= 1
        return outputs

    return patch.object(ReplayLog, "lose", lose)


def what_a_replica_aborts_has_ended() -> Any:
    original = ReplayLog.accept

    def accept(self: ReplayLog, outputs: StepOutputs) -> StepOutputs:
        with patch.object(self, "_is_stopping", True):
            return original(self, outputs)

    return patch.object(ReplayLog, "accept", accept)


def an_aborted_request_stays_parked() -> Any:
    original = ReplayLog.forget

    def forget(self: ReplayLog, request_id: str) -> int | None:
        entry = self._entries.get(request_id)
        return original(self, request_id) if entry is None or entry.dp_rank is not None else None

    return patch.object(ReplayLog, "forget", forget)


def every_suspect_of_a_second_loss_is_blamed() -> Any:
    original = ReplayLog.lose

    def lose(self: ReplayLog, dp_rank: int, now: float) -> list[EngineCoreOutput]:
        suspects = [
            entry
            for entry in self._entries.values()
            if entry.dp_rank == dp_rank and not entry.made_progress and entry.num_suspicions == 1
        ]
        outputs = original(self, dp_rank, now)
        for entry in suspects:
            if entry in self._entries.values():
                self._suspects._blame(entry)
                outputs += self._end_equals({fingerprint(entry.request)})
        return outputs

    return patch.object(ReplayLog, "lose", lose)


def progress_does_not_clear_a_suspect() -> Any:
    original = Suspects.progressed

    def progressed(self: Suspects, request: TrackedRequest) -> None:
        num_suspicions = request.num_suspicions
        original(self, request)
        request.num_suspicions, request.made_progress = num_suspicions, False

    return patch.object(Suspects, "progressed", progressed)


def a_poisonous_request_is_tried_for_ever() -> Any:
    return patch.object(Suspects, "_is_guilty", lambda self, request, *, is_alone: False)


def parked_requests_never_expire() -> Any:
    return patch.object(ReplayLog, "next_expiry_at", lambda self: None)


def a_replica_that_was_lost_and_is_back_counts_as_the_same() -> Any:
    original = DpClient.apply

    def apply(self: DpClient, update: FleetUpdate) -> None:
        was_ready = {rank for rank, known in self._replicas.items() if known.state is ReplicaState.READY}
        replicas = [
            self._replicas[replica.dp_rank]
            if replica.dp_rank in was_ready and replica.state is ReplicaState.LOST
            else replica
            for replica in update.replicas
        ]
        original(self, msgspec.structs.replace(update, replicas=replicas))

    return patch.object(DpClient, "apply", apply)


def an_abort_is_not_passed_on() -> Any:
    async def abort_requests(self: DpClient, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._replay.forget(request_id)
        self._send_lost_requests()

    return patch.object(DpClient, "abort_requests", abort_requests)


def a_cleared_suspect_does_not_let_the_next_one_be_tried() -> Any:
    async def receive(self: DpClient) -> StepOutputs:
        assert self._sockets is not None
        return self._replay.accept((await self._sockets.recv()).outputs)

    return patch.object(DpClient, "_receive", receive)


def requests_of_a_dead_front_end_run_on() -> Any:
    def greet(self: EngineCoreLoop, hello: ClientHello) -> None:
        self._incarnations[hello.client_index] = hello.incarnation
        self._output.put(hello)

    return patch.object(EngineCoreLoop, "_greet", greet)


def a_late_word_of_a_death_ends_the_next_life() -> Any:
    def lose(self: EngineCoreLoop, gone: FrontEndGone) -> None:
        self._core.abort_client(gone.client_index)

    return patch.object(EngineCoreLoop, "_lose", lose)


def an_older_report_replaces_a_newer_one() -> Any:
    def report(self: LoadTable, stats: EngineStats) -> None:
        self._stats[stats.dp_rank] = stats
        self._has_changed = True

    return patch.object(LoadTable, "report", report)


def the_balancer_chooses_among_all_that_ever_reported() -> Any:
    def usable(self: DpClient) -> list[int]:
        ready = self._ready()
        return sorted({*ready, *self.stats}) if ready else ready

    return patch.object(DpClient, "_usable", usable)


def front_ends_do_not_hear_of_a_death() -> Any:
    original = Supervision.handle

    def handle(self: Supervision, event: Event) -> list[Any]:
        instructions = original(self, event)
        if isinstance(event, ChildExited):
            return [instruction for instruction in instructions if not isinstance(instruction, PublishFleet)]
        return instructions

    return patch.object(Supervision, "handle", handle)


def a_second_death_is_not_repaired() -> Any:
    original = Supervision.handle

    def handle(self: Supervision, event: Event) -> list[Any]:
        instructions = original(self, event)
        if isinstance(event, Tick):
            return [one for one in instructions if getattr(one, "epoch", 0) < 2]
        return instructions

    return patch.object(Supervision, "handle", handle)


BUGS: dict[str, Patch] = {
    bug.__name__: bug
    for bug in (
        outputs_of_older_attempts_are_taken,
        tokens_of_older_attempts_are_taken,
        a_replay_begins_at_the_prompt,
        a_replay_is_sent_as_the_same_attempt,
        what_a_replica_aborts_has_ended,
        an_aborted_request_stays_parked,
        every_suspect_of_a_second_loss_is_blamed,
        progress_does_not_clear_a_suspect,
        a_poisonous_request_is_tried_for_ever,
        parked_requests_never_expire,
        a_replica_that_was_lost_and_is_back_counts_as_the_same,
        an_abort_is_not_passed_on,
        a_cleared_suspect_does_not_let_the_next_one_be_tried,
        requests_of_a_dead_front_end_run_on,
        a_late_word_of_a_death_ends_the_next_life,
        an_older_report_replaces_a_newer_one,
        the_balancer_chooses_among_all_that_ever_reported,
        front_ends_do_not_hear_of_a_death,
        a_second_death_is_not_repaired,
    )
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with BUGS[name]():
        yield
