"""The life of a cluster as events and instructions; no process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.supervision import Supervision
from phalanx.cluster.supervision_events import (
    AddReplica,
    Announce,
    ChildExited,
    ChildKind,
    ChildReady,
    ChildState,
    ClusterState,
    Instruction,
    Kill,
    PublishFleet,
    Recycle,
    RemoveReplica,
    ReplicaMode,
    Report,
    RestartPolicy,
    SetMode,
    Start,
    StopRequested,
    Terminate,
    Tick,
)
from phalanx.shm.exit_codes import ExitCode

CHILDREN = {
    "coordinator": ChildKind.COORDINATOR,
    "dp0": ChildKind.ENGINE_CORE,
    "dp1": ChildKind.ENGINE_CORE,
    "api0": ChildKind.API_SERVER,
}


def starting() -> Supervision:
    return Supervision(
        CHILDREN,
        started_at=0.0,
        start_timeout_s=100.0,
        drain_timeout_s=30.0,
        stop_timeout_s=5.0,
        restart=RestartPolicy(
            max_restarts=2, window_s=600.0, backoff_s=1.0, max_backoff_s=30.0, start_timeout_s=100.0
        ),
    )


def serving() -> Supervision:
    supervision = starting()
    for role in CHILDREN:
        supervision.handle(ChildReady(role=role))
    assert supervision.state is ClusterState.SERVING
    return supervision


def exited(role: str, *, exitcode: int = 0, at: float = 50.0, is_config_error: bool = False) -> ChildExited:
    return ChildExited(
        role=role, problem=f"{role} is gone", exitcode=exitcode, is_config_error=is_config_error, at=at
    )


def test_it_serves_when_the_last_child_is_ready() -> None:
    supervision = starting()

    assert [supervision.handle(ChildReady(role=role)) for role in list(CHILDREN)[:3]] == [
        [PublishFleet()]
    ] * 3
    assert supervision.handle(ChildReady(role="api0")) == [PublishFleet(), Announce()]
    assert supervision.deadline is None


def test_a_boot_failure_stops_all_and_is_not_restarted() -> None:
    supervision = starting()

    assert supervision.handle(exited("dp1", exitcode=3)) == [
        Report(sentence="dp1 is gone"),
        PublishFleet(),
        Terminate(roles=("coordinator", "dp0", "api0")),
    ]
    assert supervision.exit_code is ExitCode.FAILED


@pytest.mark.parametrize("role", list(CHILDREN))
def test_a_child_that_dies_is_started_again_at_once_and_after_another_death_with_a_pause(role: str) -> None:
    supervision = serving()

    report, publish = supervision.handle(exited(role, exitcode=-9, at=50.0))
    assert report == Report(sentence=f"{role} is gone; starting it again at once")
    assert publish == PublishFleet()
    assert supervision.state is ClusterState.SERVING
    assert supervision.deadline == 50.0
    assert supervision.handle(Tick(at=50.0)) == [Start(role=role, epoch=1)]
    assert supervision.child_state(role) is ChildState.STARTING
    publish, report = supervision.handle(ChildReady(role=role))
    assert publish == PublishFleet()
    assert supervision.deadline is None

    report, _ = supervision.handle(exited(role, exitcode=-9, at=60.0))
    assert report == Report(sentence=f"{role} is gone; starting it again in 1 s")
    assert supervision.deadline == 61.0
    assert supervision.handle(Tick(at=60.9)) == []
    assert supervision.handle(Tick(at=61.0)) == [Start(role=role, epoch=2)]


def test_the_pause_doubles_up_to_its_longest() -> None:
    policy = RestartPolicy(
        max_restarts=9, window_s=600.0, backoff_s=1.0, max_backoff_s=5.0, start_timeout_s=100.0
    )

    assert [policy.pause_s(num_deaths) for num_deaths in range(1, 7)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]


def kill_often(supervision: Supervision, role: str, *, at: float = 50.0) -> list[Instruction]:
    """Let a child die once more than its budget allows."""
    for count in range(2):
        supervision.handle(exited(role, exitcode=-9, at=at + 10 * count))
        supervision.handle(Tick(at=at + 10 * count + 5))
        supervision.handle(ChildReady(role=role))
    return supervision.handle(exited(role, exitcode=-9, at=at + 30))


def test_a_replica_that_dies_too_often_is_given_up_and_the_rest_serves_on() -> None:
    supervision = serving()

    report, publish = kill_often(supervision, "dp0")

    assert report == Report(sentence="dp0 is gone; given up after 3 deaths in 600 s")
    assert publish == PublishFleet()
    assert supervision.state is ClusterState.SERVING
    assert supervision.child_state("dp0") is ChildState.GIVEN_UP


def test_without_any_replica_the_cluster_ends() -> None:
    supervision = serving()
    kill_often(supervision, "dp0")

    *_, terminate = kill_often(supervision, "dp1", at=100.0)

    assert terminate == Terminate(roles=("coordinator", "api0"))
    assert supervision.exit_code is ExitCode.FAILED


def test_deaths_long_ago_are_forgiven() -> None:
    supervision = serving()
    for count in range(9):
        at = 1000.0 * count
        report, _ = supervision.handle(exited("dp0", exitcode=-9, at=at))
        assert report == Report(sentence="dp0 is gone; starting it again at once")
        supervision.handle(Tick(at=at + 1))
        supervision.handle(ChildReady(role="dp0"))


def test_a_restart_that_does_not_become_ready_is_killed_and_counts_as_a_death() -> None:
    supervision = serving()
    supervision.handle(exited("dp0", exitcode=-9, at=50.0))
    supervision.handle(Tick(at=51.0))

    assert supervision.deadline == 151.0
    report, kill = supervision.handle(Tick(at=151.0))
    assert report == Report(sentence="dp0 did not become ready again")
    assert kill == Kill(roles=("dp0",))
    report, _ = supervision.handle(exited("dp0", exitcode=-9, at=151.5))
    assert report == Report(sentence="dp0 is gone; starting it again in 1 s")


def test_a_replica_lost_while_draining_does_not_stop_the_others() -> None:
    supervision = serving()
    supervision.handle(StopRequested(at=10.0))

    assert supervision.handle(exited("dp0", exitcode=-9)) == [Report(sentence="dp0 is gone"), PublishFleet()]
    assert supervision.state is ClusterState.DRAINING


def test_a_refused_configuration_keeps_its_exit_code() -> None:
    supervision = starting()
    supervision.handle(exited("dp1", exitcode=2, is_config_error=True))

    assert supervision.exit_code is ExitCode.BAD_CONFIG


def test_the_start_deadline_names_who_is_missing() -> None:
    supervision = starting()
    supervision.handle(ChildReady(role="dp0"))
    assert supervision.deadline == 100.0

    report, _, terminate = supervision.handle(Tick(at=100.0))

    assert report == Report(sentence="not ready before the deadline: api0, coordinator, dp1")
    assert terminate == Terminate(roles=tuple(CHILDREN))
    assert supervision.exit_code is ExitCode.FAILED


def test_a_stop_drains_the_front_ends_first_and_then_stops_the_rest() -> None:
    supervision = serving()

    assert supervision.handle(StopRequested(at=10.0)) == [PublishFleet(), Terminate(roles=("api0",))]
    assert supervision.state is ClusterState.DRAINING
    assert supervision.handle(exited("api0")) == [
        PublishFleet(),
        Terminate(roles=("coordinator", "dp0", "dp1")),
    ]
    for role in ("dp1", "coordinator", "dp0"):
        assert supervision.handle(exited(role)) == []
    assert supervision.state is ClusterState.DONE
    assert supervision.exit_code is ExitCode.OK


def test_the_drain_budget_is_bounded() -> None:
    supervision = serving()
    supervision.handle(StopRequested(at=10.0))

    assert supervision.handle(Tick(at=44.9)) == []
    report, _, terminate = supervision.handle(Tick(at=45.0))
    assert report == Report(sentence="the drain budget is spent")
    assert isinstance(terminate, Terminate)
    assert supervision.handle(Tick(at=50.0)) == [Kill(roles=tuple(CHILDREN))]


def test_a_second_stop_ends_the_drain_and_a_third_kills() -> None:
    supervision = serving()
    supervision.handle(StopRequested(at=10.0))

    assert supervision.handle(StopRequested(at=11.0)) == [PublishFleet(), Terminate(roles=tuple(CHILDREN))]
    assert supervision.handle(StopRequested(at=11.1)) == [Kill(roles=tuple(CHILDREN))]
    assert supervision.exit_code is ExitCode.INTERRUPTED


def test_nobody_waits_for_replicas_that_are_not_started_again_for_the_cluster_stops() -> None:
    supervision = serving()
    supervision.handle(exited("dp0", exitcode=-9, at=9.0))
    supervision.handle(exited("dp1", exitcode=-9, at=9.0))

    supervision.handle(StopRequested(at=9.1))

    assert supervision.state is ClusterState.STOPPING
    assert supervision.exit_code is ExitCode.OK


def test_a_replica_that_is_back_while_the_cluster_drains_is_told_of() -> None:
    supervision = serving()
    supervision.handle(exited("dp0", exitcode=-9, at=9.0))
    supervision.handle(Tick(at=10.0))
    supervision.handle(StopRequested(at=10.5))

    assert supervision.handle(ChildReady(role="dp0")) == [PublishFleet()]


def test_a_stop_while_starting_needs_no_drain() -> None:
    supervision = starting()

    assert supervision.handle(StopRequested(at=1.0)) == [PublishFleet(), Terminate(roles=tuple(CHILDREN))]
    assert supervision.exit_code is ExitCode.INTERRUPTED


def test_losing_the_last_replica_while_draining_is_a_failure() -> None:
    supervision = serving()
    supervision.handle(StopRequested(at=10.0))
    supervision.handle(exited("dp0", exitcode=-9))
    supervision.handle(exited("dp1", exitcode=-9))

    assert supervision.state is ClusterState.STOPPING
    assert supervision.exit_code is ExitCode.FAILED


def test_a_recycled_replica_leaves_in_order_and_comes_back_without_a_death() -> None:
    supervision = serving()

    assert supervision.handle(Recycle(role="dp0", at=10.0)) == [PublishFleet(), Terminate(roles=("dp0",))]
    assert supervision.child_state("dp0") is ChildState.LEAVING
    assert supervision.deadline == 15.0
    assert supervision.handle(exited("dp0", at=11.0)) == [Start(role="dp0", epoch=1), PublishFleet()]
    assert supervision.num_failures("dp0") == 0


def test_a_recycled_replica_that_does_not_leave_is_killed() -> None:
    supervision = serving()
    supervision.handle(Recycle(role="dp0", at=10.0))

    assert supervision.handle(Tick(at=15.0)) == [Kill(roles=("dp0",))]
    assert supervision.handle(exited("dp0", exitcode=-9, at=15.1))[0] == Start(role="dp0", epoch=1)


def test_a_mode_outlives_a_death() -> None:
    supervision = serving()
    supervision.handle(SetMode(role="dp1", mode=ReplicaMode.DRAINED))
    supervision.handle(exited("dp1", exitcode=-9, at=50.0))
    supervision.handle(Tick(at=51.0))
    supervision.handle(ChildReady(role="dp1"))

    assert supervision.mode("dp1") is ReplicaMode.DRAINED
    assert supervision.num_failures("dp1") == 1
    assert supervision.last_problem("dp1") == "dp1 is gone"


def test_a_replica_is_added_and_removed() -> None:
    supervision = serving()

    assert supervision.handle(AddReplica(role="dp2", at=10.0)) == [Start(role="dp2", epoch=0), PublishFleet()]
    supervision.handle(ChildReady(role="dp2"))
    assert supervision.handle(RemoveReplica(role="dp2", at=20.0)) == [
        PublishFleet(),
        Terminate(roles=("dp2",)),
    ]
    assert supervision.handle(exited("dp2", at=21.0)) == [PublishFleet()]
    assert "dp2" not in supervision.roles
    assert supervision.handle(AddReplica(role="dp2", at=30.0))[0] == Start(role="dp2", epoch=1)


def test_a_stop_while_replicas_leave_ends_as_ever() -> None:
    supervision = serving()
    supervision.handle(Recycle(role="dp0", at=10.0))
    supervision.handle(StopRequested(at=11.0))
    supervision.handle(exited("dp0", at=11.5))

    assert supervision.state is ClusterState.DRAINING
    assert supervision.handle(exited("api0", at=12.0)) == [
        PublishFleet(),
        Terminate(roles=("coordinator", "dp1")),
    ]


EVENTS = st.one_of(
    st.sampled_from(["dp0", "dp1"]).map(lambda role: ("recycle", role)),
    st.sampled_from(list(CHILDREN)).map(lambda role: ("ready", role)),
    st.sampled_from(list(CHILDREN)).map(lambda role: ("exit", role)),
    st.just(("stop", "")),
    st.just(("tick", "")),
)


@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens_it_ends_and_never_names_a_dead_child(events: list[tuple[str, str]]) -> None:
    supervision = starting()
    alive = set(CHILDREN)
    epochs = dict.fromkeys(CHILDREN, 0)
    now = 0.0

    def feed(kind: str, role: str) -> None:
        nonlocal now
        now += 1.0
        match kind:
            case "ready" if role in alive:
                instructions = supervision.handle(ChildReady(role=role))
            case "exit" if role in alive:
                alive.remove(role)
                instructions = supervision.handle(exited(role, exitcode=-9, at=now))
            case "recycle":
                instructions = supervision.handle(Recycle(role=role, at=now))
            case "stop":
                instructions = supervision.handle(StopRequested(at=now))
            case _:
                now = max(now, supervision.deadline or now)
                instructions = supervision.handle(Tick(at=now))
        for instruction in instructions:
            if isinstance(instruction, Terminate | Kill):
                assert set(instruction.roles) <= alive
            if isinstance(instruction, Start):
                assert instruction.role not in alive
                assert instruction.epoch == epochs[instruction.role] + 1
                epochs[instruction.role] += 1
                alive.add(instruction.role)

    for kind, role in events:
        feed(kind, role)
    feed("stop", "")
    feed("stop", "")
    for role in CHILDREN:
        feed("exit", role)
    assert supervision.state is ClusterState.DONE
