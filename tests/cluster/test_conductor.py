"""Commands against a simulated supervisor: what replicas end up as, and what the operator is told."""

from collections.abc import Mapping

import pytest

from phalanx.cluster.admin import ReplicaView
from phalanx.cluster.conductor import Conductor
from phalanx.cluster.messages import AdminCommand, AdminKind, AdminResult, AdminStatus
from phalanx.cluster.operations import Weights
from phalanx.cluster.supervision import Supervision
from phalanx.cluster.supervision_events import (
    ChildExited,
    ChildKind,
    ChildReady,
    ChildState,
    Event,
    Instruction,
    ReplicaMode,
    RestartPolicy,
    Start,
    Terminate,
    Tick,
)
from phalanx.engine.core_control import ControlKind, CoreControl, CoreControlDone
from phalanx.shm.errors import ConfigError
from phalanx.workers.sleep import SleepLevel

OLD = Weights(path="/models/old", version="old")


class Cluster:
    """Supervision and conductor, and processes that do what they are told when the test lets them."""

    def __init__(self, num_replicas: int = 2) -> None:
        self.now = 100.0
        roles = {f"dp{rank}": ChildKind.ENGINE_CORE for rank in range(num_replicas)}
        roles |= {"api0": ChildKind.API_SERVER}
        self.supervision = Supervision(
            roles,
            started_at=0.0,
            start_timeout_s=100.0,
            drain_timeout_s=30.0,
            stop_timeout_s=5.0,
            restart=RestartPolicy(
                max_restarts=1, window_s=600.0, backoff_s=1.0, max_backoff_s=30.0, start_timeout_s=100.0
            ),
        )
        self.conductor = Conductor(self, default_timeout_s=60.0, clock=lambda: self.now)
        self.weights: dict[int, Weights] = {}
        self.sizes: list[int] = []
        self.max_size = 8
        self.bad_paths: set[str] = set()
        self.calls: list[tuple[int, CoreControl]] = []
        self.results: list[AdminResult] = []
        self.instructions: list[Instruction] = []
        self.num_published = 0
        self.has_front_end = True
        for role in roles:
            self.supervision.handle(ChildReady(role=role))

    # The conductor's hands.

    def handle(self, event: Event) -> None:
        self.instructions += self.supervision.handle(event)
        self.publish()

    def replicas(self) -> Mapping[int, ReplicaView]:
        return {
            int(role[2:]): ReplicaView(
                state=self.supervision.child_state(role),
                mode=self.supervision.mode(role),
                weights=self.weights.get(int(role[2:]), OLD),
            )
            for role in self.supervision.roles
            if role.startswith("dp")
        }

    def epoch(self, dp_rank: int) -> int:
        return self.supervision.epoch(f"dp{dp_rank}")

    def set_weights(self, dp_rank: int, weights: Weights) -> None:
        self.weights[dp_rank] = weights

    def check_weights(self, path: str) -> None:
        if path in self.bad_paths:
            raise ConfigError("path", "holds no weights")

    def call(self, dp_rank: int, control: CoreControl) -> bool:
        self.calls.append((dp_rank, control))
        return True

    def resize(self, num_replicas: int) -> None:
        if num_replicas > self.max_size:
            raise ConfigError("dp", "there are no devices for that")
        self.sizes.append(num_replicas)

    def publish(self) -> None:
        self.num_published += 1

    def answer(self, result: AdminResult) -> None:
        self.results.append(result)

    # What the test lets happen.

    def command(self, kind: AdminKind, **fields: object) -> None:
        self.conductor.take(AdminCommand(command_id=len(self.results), kind=kind, **fields))  # type: ignore[arg-type]

    def applied(self) -> None:
        self.conductor.applied(self.num_published)

    def ready(self, dp_rank: int) -> None:
        self.handle(ChildReady(role=f"dp{dp_rank}"))
        self.conductor.ready(dp_rank)

    def exited(self, dp_rank: int, problem: str = "it died") -> None:
        role = f"dp{dp_rank}"
        epoch = self.supervision.epoch(role)
        self.handle(ChildExited(role=role, problem=problem, exitcode=0, is_config_error=False, at=self.now))
        self.conductor.exited(dp_rank, epoch, problem)

    def answered(self, dp_rank: int, error: str | None = None) -> None:
        call_id = [control.call_id for rank, control in self.calls if rank == dp_rank][-1]
        self.conductor.answered(dp_rank, CoreControlDone(call_id=call_id, error=error))

    @property
    def modes(self) -> dict[int, ReplicaMode]:
        return {rank: view.mode for rank, view in self.replicas().items()}

    @property
    def result(self) -> AdminResult:
        (result,) = self.results
        return result

    def problems(self) -> list[str | None]:
        return [replica.problem for replica in self.result.replicas]


def test_a_drain_is_over_when_the_front_end_has_moved_the_requests() -> None:
    cluster = Cluster()

    cluster.command(AdminKind.DRAIN, dp_rank=1)
    assert cluster.results == []
    cluster.conductor.applied(cluster.num_published - 1)
    assert cluster.results == []
    cluster.applied()

    assert cluster.result.status is AdminStatus.DONE
    assert cluster.modes == {0: ReplicaMode.ACTIVE, 1: ReplicaMode.DRAINED}


def test_a_front_end_that_is_gone_holds_nothing() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.DRAIN, dp_rank=1)
    cluster.conductor.applied(None)
    assert cluster.result.status is AdminStatus.DONE

    cluster.results.clear()
    cluster.has_front_end = False
    cluster.command(AdminKind.RESUME, dp_rank=1)
    assert cluster.result.status is AdminStatus.DONE


@pytest.mark.parametrize(
    ("kind", "fields", "status"),
    [
        (AdminKind.DRAIN, {"dp_rank": 7}, AdminStatus.UNKNOWN),
        (AdminKind.RELOAD, {}, AdminStatus.INVALID),
        (AdminKind.RELOAD, {"path": "/bad"}, AdminStatus.INVALID),
        (AdminKind.SCALE, {"data_parallel_size": 0}, AdminStatus.INVALID),
        (AdminKind.SCALE, {"data_parallel_size": 1000}, AdminStatus.INVALID),
        (AdminKind.SCALE, {"data_parallel_size": 9}, AdminStatus.INVALID),
    ],
)
def test_what_cannot_be_meant_is_refused(
    kind: AdminKind, fields: dict[str, object], status: AdminStatus
) -> None:
    cluster = Cluster()
    cluster.bad_paths.add("/bad")

    cluster.command(kind, **fields)

    assert cluster.result.status is status
    assert cluster.result.problem
    assert cluster.conductor.operation is None
    assert cluster.instructions == []


def test_the_last_replica_that_serves_is_not_drained() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.DRAIN, dp_rank=0)
    cluster.applied()
    cluster.results.clear()

    cluster.command(AdminKind.DRAIN, dp_rank=1)
    assert cluster.result.status is AdminStatus.CONFLICT


def test_one_operation_at_a_time() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.DRAIN, dp_rank=1)
    cluster.command(AdminKind.PAUSE)

    assert cluster.result.status is AdminStatus.CONFLICT
    assert cluster.result.problem == "drain is under way"


def test_a_rolling_restart_goes_one_by_one_and_costs_no_budget() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.RESTART)

    for rank in (0, 1):
        assert cluster.modes[1 - rank] is ReplicaMode.ACTIVE
        cluster.applied()
        assert cluster.instructions[-1] == Terminate(roles=(f"dp{rank}",))
        cluster.exited(rank)
        cluster.ready(rank)
        cluster.applied()

    assert cluster.result.status is AdminStatus.DONE
    assert [cluster.epoch(rank) for rank in (0, 1)] == [1, 1]
    assert [cluster.supervision.num_failures(f"dp{rank}") for rank in (0, 1)] == [0, 0]


def test_weights_that_do_not_load_are_taken_back_and_the_others_not_tried() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.RELOAD, path="/models/new", version="new")
    cluster.applied()
    cluster.exited(0)
    assert cluster.weights[0] == Weights(path="/models/new", version="new")
    cluster.exited(0, "the tensor x has the wrong shape")
    assert cluster.weights[0] == OLD
    cluster.ready(0)
    cluster.applied()

    assert cluster.result.status is AdminStatus.FAILED
    assert cluster.problems() == ["the tensor x has the wrong shape", "not tried: dp0 failed"]
    assert cluster.modes == {0: ReplicaMode.ACTIVE, 1: ReplicaMode.ACTIVE}
    assert 1 not in cluster.weights


def test_a_pause_of_which_one_fails_is_taken_back() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.PAUSE)
    cluster.answered(0)
    cluster.answered(1, "no")
    assert [control.kind for _, control in cluster.calls[2:]] == [ControlKind.RESUME, ControlKind.RESUME]
    cluster.answered(0)
    cluster.answered(1)

    assert cluster.result.status is AdminStatus.FAILED
    assert not cluster.conductor.is_paused


def test_a_replica_that_starts_in_a_pause_is_paused_too() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.PAUSE)
    cluster.answered(0)
    cluster.answered(1)
    assert cluster.conductor.is_paused
    cluster.exited(1)
    cluster.handle(Tick(at=200.0))
    cluster.calls.clear()

    cluster.ready(1)
    assert [control.kind for _, control in cluster.calls] == [ControlKind.PAUSE]

    cluster.results.clear()
    cluster.command(AdminKind.UNPAUSE)
    cluster.answered(0)
    cluster.answered(1)
    assert cluster.result.status is AdminStatus.DONE
    assert not cluster.conductor.is_paused


def test_a_replica_that_is_back_before_the_others_have_paused_is_paused_too() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.PAUSE)
    cluster.answered(1)
    cluster.exited(1)
    cluster.handle(Tick(at=200.0))
    cluster.ready(1)

    cluster.answered(0)

    assert cluster.result.status is AdminStatus.DONE
    last = {rank: control.kind for rank, control in cluster.calls}
    assert last == {0: ControlKind.PAUSE, 1: ControlKind.PAUSE}


def test_a_replica_that_dies_in_its_sleep_sleeps_on() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.SLEEP, dp_rank=1, level=SleepLevel.DROP)
    cluster.applied()
    cluster.answered(1)
    cluster.applied()
    assert cluster.modes == {0: ReplicaMode.ACTIVE, 1: ReplicaMode.ASLEEP}
    cluster.exited(1)
    cluster.handle(Tick(at=200.0))
    cluster.calls.clear()

    cluster.ready(1)

    assert [(control.kind, control.level) for _, control in cluster.calls][-1] == (
        ControlKind.SLEEP,
        SleepLevel.DROP,
    )
    assert cluster.modes[1] is ReplicaMode.ASLEEP


def test_a_sleep_that_fails_is_woken_again() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.SLEEP, dp_rank=1)
    cluster.applied()
    cluster.answered(1, "tp0: stuck")
    assert cluster.calls[-1][1].kind is ControlKind.WAKE
    cluster.answered(1)
    cluster.applied()

    assert cluster.problems() == ["tp0: stuck"]
    assert cluster.modes[1] is ReplicaMode.ACTIVE


def test_a_death_in_the_middle_of_a_call_fails_it() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.RESET_PREFIX_CACHE)
    cluster.answered(0)
    cluster.exited(1, "killed by signal 9")

    assert cluster.problems() == [None, "killed by signal 9"]


def test_the_cluster_grows() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.SCALE, data_parallel_size=4)
    assert cluster.sizes == [4]
    assert cluster.instructions.count(Start(role="dp2", epoch=0)) == 1
    cluster.ready(2)
    assert cluster.results == []
    cluster.ready(3)

    assert cluster.result.status is AdminStatus.DONE
    assert sorted(cluster.replicas()) == [0, 1, 2, 3]
    assert cluster.sizes[-1] == 4


def test_a_replica_that_does_not_start_takes_all_new_ones_back() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.SCALE, data_parallel_size=4)
    cluster.ready(2)
    cluster.exited(3, "no memory")
    assert 3 not in cluster.replicas()
    cluster.exited(2)

    assert cluster.problems() == ["taken back: dp3 failed", "no memory"]
    assert sorted(cluster.replicas()) == [0, 1]
    assert cluster.sizes[-1] == 2


def test_the_cluster_shrinks_from_its_end_and_epochs_are_never_used_twice() -> None:
    cluster = Cluster(3)
    cluster.command(AdminKind.SCALE, data_parallel_size=1)
    assert cluster.modes == {0: ReplicaMode.ACTIVE, 1: ReplicaMode.DRAINED, 2: ReplicaMode.DRAINED}
    cluster.applied()
    cluster.exited(2)
    cluster.exited(1)

    assert cluster.result.status is AdminStatus.DONE
    assert sorted(cluster.replicas()) == [0]
    cluster.results.clear()
    cluster.command(AdminKind.SCALE, data_parallel_size=2)
    assert cluster.instructions.count(Start(role="dp1", epoch=1)) == 1


def test_a_replica_that_was_given_up_is_started_by_a_resume() -> None:
    cluster = Cluster()
    cluster.exited(1)
    cluster.handle(Tick(at=200.0))
    cluster.exited(1)
    assert cluster.replicas()[1].state is ChildState.GIVEN_UP

    cluster.command(AdminKind.RESUME, dp_rank=1)
    cluster.ready(1)
    cluster.applied()

    assert cluster.result.status is AdminStatus.DONE
    assert cluster.replicas()[1].serves


def test_what_takes_too_long_is_told() -> None:
    cluster = Cluster()
    cluster.command(AdminKind.RESET_PREFIX_CACHE, timeout_s=3.0)
    assert cluster.conductor.deadline == 103.0
    cluster.answered(0)
    cluster.now = 103.0
    cluster.conductor.tick()

    assert cluster.problems() == [None, "call: not done in time"]
    # The answer that comes after all is nobody's.
    cluster.answered(1)
    assert len(cluster.results) == 1
