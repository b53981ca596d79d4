"""Several front ends and one supervisor: who is waited for, who is answered, and what all of them know."""

from typing import cast

import msgspec
import pytest

from phalanx.cluster.front_end_board import NUM_COLUMNS, FrontEndBoard
from phalanx.cluster.front_ends import FrontEnds
from phalanx.cluster.messages import (
    AdminCommand,
    AdminKind,
    AdminResult,
    AdminStatus,
    BlamedRequests,
    FleetUpdate,
    ToFrontEnd,
)
from phalanx.cluster.supervision import Supervision
from phalanx.cluster.supervision_events import (
    ChildExited,
    ChildKind,
    ChildReady,
    RestartPolicy,
    Tick,
)
from phalanx.cluster.suspects import MAX_FINGERPRINTS
from phalanx.engine.core_control import FrontEndGone
from phalanx.shm.errors import QueueClosedError
from phalanx.shm.number_table import NumberTable
from phalanx.shm.process import ChildProcess

ToChild = ToFrontEnd | FrontEndGone
KINDS = {"dp0": ChildKind.ENGINE_CORE, "api0": ChildKind.API_SERVER, "api1": ChildKind.API_SERVER}


UPDATE = FleetUpdate(replicas=[], sequence=7)


class Child:
    """Keeps what it is told, while it lives."""

    def __init__(self) -> None:
        self.told: list[ToChild] = []
        self.is_alive = True

    def send(self, payload: bytes) -> None:
        if not self.is_alive:
            raise QueueClosedError("gone")
        self.told.append(msgspec.msgpack.decode(payload, type=ToChild))


class Cluster:
    """The real Supervision and FrontEnds over such children."""

    def __init__(self) -> None:
        self.supervision = Supervision(
            KINDS,
            started_at=0.0,
            start_timeout_s=100.0,
            drain_timeout_s=30.0,
            stop_timeout_s=5.0,
            restart=RestartPolicy(
                max_restarts=9, window_s=600.0, backoff_s=1.0, max_backoff_s=1.0, start_timeout_s=100.0
            ),
        )
        self.children = {role: Child() for role in KINDS}
        self.table = NumberTable.private(2, NUM_COLUMNS)
        # What FrontEnds uses of a child is `send`.
        children = cast(dict[str, ChildProcess], self.children)
        self.front_ends = FrontEnds(self.supervision, children, self.table)
        for role in KINDS:
            self.supervision.handle(ChildReady(role=role))

    def die(self, role: str) -> None:
        self.children[role].is_alive = False
        epoch = self.supervision.epoch(role)
        self.supervision.handle(
            ChildExited(role=role, problem="it died", exitcode=-9, is_config_error=False, at=1.0)
        )
        self.front_ends.gone(role, epoch)

    def start_again(self, role: str) -> None:
        self.supervision.handle(Tick(at=10.0))
        self.children[role] = Child()
        self.front_ends.started(role, UPDATE)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_an_update_is_done_when_each_that_serves_has_done_it(cluster: Cluster) -> None:
    front_ends = cluster.front_ends
    front_ends.applied("api0", 5)
    assert front_ends.applied_by_all == -1, "nothing is known of the other one"

    front_ends.applied("api1", 3)
    assert front_ends.applied_by_all == 3
    cluster.die("api1")
    assert front_ends.applied_by_all == 5
    assert front_ends.has_any
    cluster.start_again("api1")
    assert front_ends.applied_by_all == 5, "it serves nobody yet"
    cluster.supervision.handle(ChildReady(role="api1"))
    assert front_ends.applied_by_all == -1
    front_ends.applied("api1", 6)
    assert front_ends.applied_by_all == 5

    cluster.die("api0")
    cluster.die("api1")
    assert front_ends.applied_by_all is None
    assert not front_ends.has_any


def test_all_that_have_a_process_are_told(cluster: Cluster) -> None:
    cluster.die("api1")
    update = FleetUpdate(replicas=[], sequence=1)

    cluster.front_ends.tell_all(update)

    assert [cluster.children[role].told for role in ("api0", "api1")] == [[update], []]


def test_engine_cores_hear_which_life_of_a_front_end_has_ended(cluster: Cluster) -> None:
    cluster.die("api1")
    cluster.start_again("api1")
    cluster.die("api1")

    words = [FrontEndGone(client_index=1, incarnation=incarnation) for incarnation in (0, 1)]
    assert [child.told for child in cluster.children.values()] == [words, [], [UPDATE]]


def test_equal_numbers_of_two_front_ends_are_two_commands(cluster: Cluster) -> None:
    wish = AdminCommand(command_id=1, kind=AdminKind.PAUSE)
    first, second = (cluster.front_ends.take(role, wish) for role in ("api0", "api1"))
    assert first.command_id != second.command_id

    cluster.front_ends.answer(AdminResult(command_id=second.command_id, status=AdminStatus.CONFLICT))
    cluster.front_ends.answer(AdminResult(command_id=first.command_id, status=AdminStatus.DONE))

    assert cluster.children["api0"].told == [AdminResult(command_id=1, status=AdminStatus.DONE)]
    assert cluster.children["api1"].told == [AdminResult(command_id=1, status=AdminStatus.CONFLICT)]


def test_who_was_started_again_gets_no_answer_to_what_it_never_asked(cluster: Cluster) -> None:
    command = cluster.front_ends.take("api1", AdminCommand(command_id=1, kind=AdminKind.PAUSE))
    cluster.die("api1")
    cluster.start_again("api1")

    cluster.front_ends.answer(AdminResult(command_id=command.command_id, status=AdminStatus.DONE))

    assert [cluster.children[role].told for role in ("api0", "api1")] == [[], [UPDATE]]


def test_what_one_has_blamed_all_know_once(cluster: Cluster) -> None:
    cluster.front_ends.blame("api0", [b"a"])
    cluster.front_ends.blame("api1", [b"a", b"b"])

    assert cluster.children["api0"].told == [BlamedRequests(fingerprints=[b"b"])]
    assert cluster.children["api1"].told == [BlamedRequests(fingerprints=[b"a"])]
    cluster.die("api1")
    cluster.start_again("api1")
    assert cluster.children["api1"].told == [UPDATE, BlamedRequests(fingerprints=[b"a", b"b"])]


def test_only_so_many_are_remembered(cluster: Cluster) -> None:
    names = [b"%d" % number for number in range(MAX_FINGERPRINTS + 2)]
    for name in names:
        cluster.front_ends.blame("api0", [name])

    cluster.die("api1")
    cluster.start_again("api1")

    assert cluster.children["api1"].told == [UPDATE, BlamedRequests(fingerprints=names[2:])]


def test_the_row_of_one_that_has_ended_is_cleared(cluster: Cluster) -> None:
    FrontEndBoard(cluster.table, 1).set_trial(0)
    assert FrontEndBoard(cluster.table, 0).is_trial_elsewhere()

    cluster.die("api1")

    assert not FrontEndBoard(cluster.table, 0).is_trial_elsewhere()
