"""The life of a cluster as events and instructions; no process."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.supervision import (
    Announce,
    ChildExited,
    ChildKind,
    ChildReady,
    ClusterState,
    Kill,
    PublishFleet,
    Report,
    StopRequested,
    Supervision,
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
        CHILDREN, started_at=0.0, start_timeout_s=100.0, drain_timeout_s=30.0, stop_timeout_s=5.0
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


def test_a_refused_configuration_keeps_its_exit_code() -> None:
    supervision = starting()
    supervision.handle(exited("dp1", exitcode=2, is_config_error=True))

    assert supervision.exit_code is ExitCode.BAD_CONFIG


def test_the_start_deadline_names_who_is_missing() -> None:
    supervision = starting()
    supervision.handle(ChildReady(role="dp0"))
    assert supervision.deadline == 100.0

    report, terminate = supervision.handle(Tick(at=100.0))

    assert report == Report(sentence="not ready before the deadline: api0, coordinator, dp1")
    assert terminate == Terminate(roles=tuple(CHILDREN))
    assert supervision.exit_code is ExitCode.FAILED


def test_a_stop_drains_the_front_ends_first_and_then_stops_the_rest() -> None:
    supervision = serving()

    assert supervision.handle(StopRequested(at=10.0)) == [Terminate(roles=("api0",))]
    assert supervision.state is ClusterState.DRAINING
    assert supervision.handle(exited("api0")) == [Terminate(roles=("coordinator", "dp0", "dp1"))]
    for role in ("dp1", "coordinator", "dp0"):
        assert supervision.handle(exited(role)) == []
    assert supervision.state is ClusterState.DONE
    assert supervision.exit_code is ExitCode.OK


def test_the_drain_budget_is_bounded() -> None:
    supervision = serving()
    supervision.handle(StopRequested(at=10.0))

    assert supervision.handle(Tick(at=44.9)) == []
    report, terminate = supervision.handle(Tick(at=45.0))
    assert report == Report(sentence="the drain budget is spent")
    assert isinstance(terminate, Terminate)
    assert supervision.handle(Tick(at=50.0)) == [Kill(roles=tuple(CHILDREN))]


def test_a_second_stop_ends_the_drain_and_a_third_kills() -> None:
    supervision = serving()
    supervision.handle(StopRequested(at=10.0))

    assert supervision.handle(StopRequested(at=11.0)) == [Terminate(roles=tuple(CHILDREN))]
    assert supervision.handle(StopRequested(at=11.1)) == [Kill(roles=tuple(CHILDREN))]
    assert supervision.exit_code is ExitCode.INTERRUPTED


def test_a_stop_while_starting_needs_no_drain() -> None:
    supervision = starting()

    assert supervision.handle(StopRequested(at=1.0)) == [Terminate(roles=tuple(CHILDREN))]
    assert supervision.exit_code is ExitCode.INTERRUPTED


def test_a_death_while_draining_is_a_failure() -> None:
    supervision = serving()
    supervision.handle(StopRequested(at=10.0))
    supervision.handle(exited("dp0", exitcode=-9))

    assert supervision.state is ClusterState.STOPPING
    assert supervision.exit_code is ExitCode.FAILED


EVENTS = st.one_of(
    st.sampled_from(list(CHILDREN)).map(lambda role: ("ready", role)),
    st.sampled_from(list(CHILDREN)).map(lambda role: ("exit", role)),
    st.just(("stop", "")),
    st.just(("tick", "")),
)


@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_it_ends_and_never_names_a_dead_child(events: list[tuple[str, str]]) -> None:
    supervision = starting()
    dead: set[str] = set()
    now = 0.0

    def feed(kind: str, role: str) -> None:
        nonlocal now
        now += 1.0
        match kind:
            case "ready" if role not in dead:
                instructions = supervision.handle(ChildReady(role=role))
            case "exit" if role not in dead:
                dead.add(role)
                instructions = supervision.handle(exited(role, exitcode=-9, at=now))
            case "stop":
                instructions = supervision.handle(StopRequested(at=now))
            case _:
                now = max(now, supervision.deadline or now)
                instructions = supervision.handle(Tick(at=now))
        for instruction in instructions:
            if isinstance(instruction, Terminate | Kill):
                assert not set(instruction.roles) & dead

    for kind, role in events:
        feed(kind, role)
    feed("stop", "")
    feed("stop", "")
    for role in CHILDREN:
        feed("exit", role)
    assert supervision.state is ClusterState.DONE
