"""Requests of lost replicas: continued with every token exactly once, and the guilty one found."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cluster.front_end_board import NUM_COLUMNS, FrontEndBoard
from phalanx.cluster.replay import ReplayLog
from phalanx.engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from phalanx.shm.number_table import NumberTable
from phalanx.workers.sampling_params import SamplingParams
from support.step_outputs import pack, write_out


def make_request(name: str = "a", prompt: tuple[int, ...] = (1, 2, 3)) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        client_index=0,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=10),
        eos_token_ids=(0,),
        seed=7,
        arrived_at=0.0,
    )


def tokens(name: str, *ids: int, attempt: int = 0, last: bool = False, cached: int = 0) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=name,
        attempt=attempt,
        new_token_ids=list(ids),
        finish_reason=FinishReason.LENGTH if last else None,
        num_cached_tokens=cached,
    )


def accept(log: ReplayLog, *outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
    """Take what one step made, said as an engine core says it."""
    return write_out(log.accept(pack(outputs)))


@pytest.fixture
def log() -> ReplayLog:
    return ReplayLog(wait_s=30.0)


def test_a_lost_request_continues_from_all_tokens_received(log: ReplayLog) -> None:
    log.admit(make_request(), 0)
    accept(log, tokens("a", 5))
    accept(log, tokens("a", 6))

    assert log.lose(0, now=1.0) == []

    (again,) = log.replayable()
    assert (again.attempt, again.output_token_ids, again.seed) == (1, [5, 6], 7)
    assert again.prompt_token_ids == [1, 2, 3]


def test_outputs_of_the_lost_attempt_are_dropped(log: ReplayLog) -> None:
    log.admit(make_request(), 0)
    log.lose(0, now=1.0)
    assert accept(log, tokens("a", 5)) == []
    log.replayed("a", 1)

    assert accept(log, tokens("a", 5, attempt=0)) == []
    assert accept(log, tokens("a", 5, attempt=1)) == [tokens("a", 5, attempt=0)]
    assert log.stats().num_stale_outputs == 2


def test_other_replicas_requests_are_left_alone(log: ReplayLog) -> None:
    log.admit(make_request("a"), 0)
    log.admit(make_request("b"), 1)

    log.lose(0, now=1.0)

    assert [request.request_id for request in log.replayable()] == ["a"]
    assert log.num_unfinished(1) == 1


def test_cached_tokens_are_those_of_the_first_admission(log: ReplayLog) -> None:
    log.admit(make_request(), 0)
    (first,) = accept(log, tokens("a", 5, cached=2))
    log.lose(0, now=1.0)
    log.replayed("a", 1)
    (second,) = accept(log, tokens("a", 6, attempt=1, cached=3))

    assert (first.num_cached_tokens, second.num_cached_tokens) == (2, 0)


def test_a_request_waits_for_a_replica_only_so_long(log: ReplayLog) -> None:
    log.admit(make_request(), 0)
    log.lose(0, now=1.0)

    assert log.next_expiry_at() == 31.0
    assert log.expire(30.9) == []
    (error,) = log.expire(31.0)
    assert error.finish_reason is FinishReason.ERROR
    assert log.replayable() == []
    assert log.next_expiry_at() is None


@pytest.mark.parametrize("was_sent", [True, False])
def test_a_request_that_waits_for_a_replica_ends_at_its_deadline(log: ReplayLog, was_sent: bool) -> None:
    request = msgspec.structs.replace(make_request(), deadline_at=5.0)
    if was_sent:
        log.admit(request, 0)
        log.admit(make_request("b"), 0)
        log.lose(0, now=1.0)
    else:
        log.wait(request, 1.0)
        log.wait(make_request("b"), 1.0)

    assert log.next_expiry_at() == 5.0
    assert log.expire(4.9) == []
    (end,) = log.expire(5.0)
    assert (end.request_id, end.attempt, end.finish_reason) == ("a", 0, FinishReason.TIMEOUT)
    assert log.next_expiry_at() == 31.0
    assert [waiting.request_id for waiting in log.replayable()] == ["b"]
    log.check_invariants()


@settings(max_examples=40)
@given(st.data())
def test_each_request_ends_at_its_deadline_or_when_it_has_waited_long_enough(data: st.DataObject) -> None:
    log = ReplayLog(wait_s=5.0)
    due: dict[str, tuple[float, FinishReason]] = {}
    deadlines: dict[str, float | None] = {}

    def park(name: str, now: float) -> None:
        deadline_at = deadlines[name]
        is_hasty = deadline_at is not None and deadline_at < now + 5.0
        due[name] = (deadline_at, FinishReason.TIMEOUT) if is_hasty else (now + 5.0, FinishReason.ERROR)

    for now in range(40):
        ended = {output.request_id: output.finish_reason for output in log.expire(float(now))}
        assert ended == {name: reason for name, (due_at, reason) in due.items() if due_at <= now}
        for name in ended:
            del due[name]
        name = f"r{now}"
        deadlines[name] = data.draw(st.none() | st.integers(now, now + 10).map(float))
        request = msgspec.structs.replace(make_request(name, (now,)), deadline_at=deadlines[name])
        match data.draw(st.sampled_from(["wait", "admit", "lose", "replay", "forget"])):
            case "wait":
                log.wait(request, float(now))
                park(name, float(now))
            case "admit":
                log.admit(request, 0)
                accept(log, tokens(name, 1))
            case "lose":
                log.lose(0, float(now))
                for again in log.replayable():
                    if again.request_id not in due:
                        park(again.request_id, float(now))
            case "replay" if due:
                log.replayed(min(due), 0)
                attempt = log._entries[min(due)].attempt
                accept(log, tokens(min(due), 1, attempt=attempt))
                del due[min(due)]
            case "forget" if due:
                log.forget(min(due))
                del due[min(due)]
        assert log.next_expiry_at() == min((due_at for due_at, _ in due.values()), default=None)
        log.check_invariants()


def test_a_request_that_comes_while_no_replica_serves_is_sent_to_the_first_that_does(log: ReplayLog) -> None:
    log.wait(make_request(), 1.0)

    (asked,) = log.replayable()
    log.replayed("a", 0)

    assert asked == make_request()
    assert accept(log, tokens("a", 5, last=True)) == [tokens("a", 5, last=True)]
    assert log.stats().num_replayed == 0, "it was never lost"
    log.check_invariants()


def test_a_request_that_comes_while_no_replica_serves_waits_only_so_long(log: ReplayLog) -> None:
    log.wait(make_request(), 1.0)

    assert log.next_expiry_at() == 31.0
    (error,) = log.expire(31.0)

    assert (error.finish_reason, error.error) == (FinishReason.ERROR, "no replica became ready in time")
    assert log.num_parked == 0


ABORTED = EngineCoreOutput(request_id="a", attempt=0, finish_reason=FinishReason.ABORT)


def test_what_a_replica_aborts_is_lost_with_it_and_continues(log: ReplayLog) -> None:
    log.admit(make_request(), 0)
    accept(log, tokens("a", 5))

    assert accept(log, ABORTED) == []

    assert log.lose(0, now=1.0) == []
    (again,) = log.replayable()
    assert (again.attempt, again.output_token_ids) == (1, [5])


@pytest.mark.parametrize("comes_first", ["abort", "stop"])
def test_when_the_cluster_stops_what_a_replica_aborts_has_ended(log: ReplayLog, comes_first: str) -> None:
    log.admit(make_request("a"), 0)
    log.admit(make_request("b"), 1)
    log.wait(make_request("c"), 0.0)
    ended = accept(log, ABORTED) if comes_first == "abort" else []

    ended += log.stop()
    ended += accept(log, ABORTED)

    assert [(output.request_id, output.finish_reason) for output in ended] == [
        (name, FinishReason.ABORT) for name in (("a", "c") if comes_first == "abort" else ("c", "a"))
    ]
    assert log.num_unfinished(1) == 1, "its replica may still finish it"
    log.check_invariants()


def test_an_aborted_request_is_not_replayed(log: ReplayLog) -> None:
    log.admit(make_request(), 0)
    log.lose(0, now=1.0)

    assert log.forget("a") is None
    assert log.replayable() == []
    log.check_invariants()


def lose_and_replay(log: ReplayLog, dp_rank: int, now: float = 1.0) -> list[EngineCoreOutput]:
    """Lose a replica and send what may be sent to the same rank, as it comes back."""
    ended = log.lose(dp_rank, now)
    for request in log.replayable():
        log.replayed(request.request_id, dp_rank)
    return ended


def test_a_request_that_kills_two_replicas_in_a_row_is_blamed_and_remembered(log: ReplayLog) -> None:
    log.admit(make_request(), 0)
    assert lose_and_replay(log, 0) == []

    (error,) = lose_and_replay(log, 0)

    assert error.finish_reason is FinishReason.ERROR
    assert error.is_poisonous
    assert log.is_blamed(make_request("later"))
    assert log.is_blamed(msgspec.structs.replace(make_request("later"), seed=8))
    assert not log.is_blamed(make_request("other", prompt=(1, 2, 4)))


def test_a_newcomer_is_not_blamed_for_what_dies_beside_it(log: ReplayLog) -> None:
    # Poison that had made tokens before is a suspect for the first time when the innocent is for the second.
    log.admit(make_request("poison"), 0)
    accept(log, tokens("poison", 5))
    log.admit(make_request("innocent", prompt=(9,)), 0)
    assert lose_and_replay(log, 0) == []

    assert lose_and_replay(log, 0) == []

    assert log.on_trial == 0
    assert log.num_unfinished(0) == 1, "the other one waits for its turn"


def test_nobody_is_blamed_when_the_culprit_may_have_left(log: ReplayLog) -> None:
    log.admit(make_request("innocent", prompt=(9,)), 0)
    lose_and_replay(log, 0)
    log.admit(make_request("poison"), 0)
    log.forget("poison")

    assert lose_and_replay(log, 0) == []
    assert not log.is_blamed(make_request("later", prompt=(9,)))


def test_a_trial_that_is_never_undisturbed_ends_all_the_same(log: ReplayLog) -> None:
    """One replica, newcomers all the time; it dies whenever it has the poison."""
    log.admit(make_request("poison"), 0)
    ended: list[EngineCoreOutput] = []
    num_lost = 0
    for number in range(40):
        log.admit(make_request(f"new{number}", prompt=(number,)), 0)
        if log._entries["poison"].dp_rank == 0:
            num_lost += 1
            ended += log.lose(0, now=1.0)
        else:
            for name, entry in list(log._entries.items()):
                if entry.dp_rank == 0:
                    accept(log, tokens(name, 5, attempt=entry.attempt))
        if ended:
            break
        for request in log.replayable():
            log.replayed(request.request_id, 0)

    assert [output.request_id for output in ended] == ["poison"]
    assert num_lost <= 5


def test_equal_requests_that_are_lost_together_end_together(log: ReplayLog) -> None:
    log.admit(make_request("first"), 0)
    log.admit(make_request("second"), 0)
    lose_and_replay(log, 0)
    lose_and_replay(log, 0)

    ended = lose_and_replay(log, 0)

    assert {output.request_id for output in ended} == {"first", "second"}
    assert all(output.is_poisonous for output in ended)


def test_the_guilty_one_ends_before_its_equals(log: ReplayLog) -> None:
    """Though it was parked after one that had been lost with another replica."""
    log.admit(make_request("guilty"), 0)
    lose_and_replay(log, 0)
    log.admit(make_request("equal"), 1)
    assert log.lose(1, now=1.0) == []

    ended = log.lose(0, now=1.0)

    assert [output.request_id for output in ended] == ["guilty", "equal"]
    log.check_invariants()


def test_a_request_that_makes_progress_is_never_blamed(log: ReplayLog) -> None:
    log.admit(make_request(), 0)

    for attempt in range(9):
        accept(log, tokens("a", attempt, attempt=attempt))
        assert lose_and_replay(log, 0) == []


def test_the_guilty_one_of_many_is_found_and_the_others_go_on(log: ReplayLog) -> None:
    names = ["a", "b", "poison", "c"]
    for index, name in enumerate(names):
        log.admit(make_request(name, prompt=(index,)), 0)
    ended = [*lose_and_replay(log, 0), *lose_and_replay(log, 0)]
    assert ended == []

    survivors = []
    for _ in range(10):
        running = [name for name in names if log.num_unfinished(0) and log._entries.get(name)]
        tried = [name for name in running if log._entries[name].dp_rank == 0]
        if not tried:
            break
        (name,) = tried
        if name == "poison":
            ended += lose_and_replay(log, 0)
        else:
            accept(log, tokens(name, 9, attempt=log._entries[name].attempt, last=True))
            survivors.append(name)
            for request in log.replayable():
                log.replayed(request.request_id, 0)

    assert [output.request_id for output in ended] == ["poison"]
    assert survivors == ["a", "b", "c"]


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_every_token_arrives_exactly_once_whatever_is_lost(seed: int) -> None:
    """Engines as little machines: token i of request r is (r, i); replicas die at random, messages arrive late."""
    rng = random.Random(seed)
    log = ReplayLog(wait_s=1e9)
    length = {f"r{index}": rng.randint(1, 8) for index in range(6)}
    running: dict[int, dict[str, tuple[int, int]]] = {0: {}, 1: {}}
    wires: dict[int, list[EngineCoreOutput]] = {0: [], 1: []}
    received: dict[str, list[int]] = {name: [] for name in length}
    finished: set[str] = set()

    def start(request: EngineCoreRequest, dp_rank: int) -> None:
        running[dp_rank][request.request_id] = (request.attempt, len(request.output_token_ids))

    def deliver(outputs: list[EngineCoreOutput]) -> None:
        for sent in outputs:
            for output in accept(log, sent):
                received[output.request_id] += output.new_token_ids
                if output.finish_reason is FinishReason.LENGTH:
                    finished.add(output.request_id)

    for name in length:
        rank = rng.randrange(2)
        log.admit(make_request(name), rank)
        start(make_request(name), rank)
    for _ in range(3000):
        if len(finished) == len(length):
            break
        rank = rng.randrange(2)
        event = rng.random()
        if event < 0.5 and running[rank]:
            name = rng.choice(sorted(running[rank]))
            attempt, position = running[rank][name]
            is_last = position + 1 == length[name]
            wires[rank].append(tokens(name, position, attempt=attempt, last=is_last))
            running[rank][name] = (attempt, position + 1)
            if is_last:
                del running[rank][name]
        elif event < 0.9:
            count = rng.randint(0, len(wires[rank]))
            deliver(wires[rank][:count])
            del wires[rank][:count]
        elif all(entry.made_progress or entry.num_suspicions == 0 for entry in log._entries.values()):
            # What was on the wire may still arrive after the loss was seen, or never.
            late = wires[rank] if rng.random() < 0.5 else []
            running[rank], wires[rank] = {}, []
            assert log.lose(rank, now=0.0) == []
            deliver(late)
            for request in log.replayable():
                target = rng.randrange(2)
                log.replayed(request.request_id, target)
                start(request, target)
        log.check_invariants()

    for name, count in length.items():
        assert received[name] == list(range(len(received[name])))
        assert name not in finished or received[name] == list(range(count))


def test_requests_that_are_moved_away_are_suspected_of_nothing(log: ReplayLog) -> None:
    log.admit(make_request("a"), 0)
    log.admit(make_request("b", (4, 5)), 0)
    log.admit(make_request("c", (6,)), 1)
    accept(log, tokens("a", 5))

    for attempt in (1, 2, 3):
        assert log.move_away(0, now=1.0) == ["a", "b"]
        log.check_invariants()
        again = {request.request_id: request for request in log.replayable()}
        assert {name: request.attempt for name, request in again.items()} == {"a": attempt, "b": attempt}
        assert again["a"].output_token_ids == [5]
        for name in again:
            log.replayed(name, 0)

    # What the old place still says is no news, and no request ends by it.
    assert accept(log, tokens("a", 6, attempt=2, last=True)) == []
    assert log.num_unfinished(0) == 2
    assert not log.is_blamed(make_request("b", (4, 5)))


def two_logs() -> list[ReplayLog]:
    """Two front ends of one cluster, and one replica of which both have heard."""
    table = NumberTable.private(2, NUM_COLUMNS)
    logs = [ReplayLog(wait_s=30.0, board=FrontEndBoard(table, index)) for index in range(2)]
    for log in logs:
        log.joined(0, epoch=0)
    return logs


def lose_everywhere(logs: list[ReplayLog], epoch: int) -> list[list[EngineCoreOutput]]:
    """The replica dies and is back; each front end hears both at once, one after the other."""
    ended = []
    for log in logs:
        ended.append(log.lose(0, now=1.0))
        log.joined(0, epoch)
        for request in log.replayable():
            log.replayed(request.request_id, 0)
    return ended


@pytest.mark.parametrize("is_innocent_first", [False, True])
def test_nobody_is_blamed_for_the_poison_of_another_front_end(is_innocent_first: bool) -> None:
    logs = two_logs()
    innocent, guilty = logs if is_innocent_first else logs[::-1]
    innocent.admit(make_request("innocent", prompt=(9,)), 0)
    guilty.admit(make_request("poison"), 0)

    epoch, num_losses = 0, 0
    while guilty.num_unfinished(0) or not num_losses:
        epoch, num_losses = epoch + 1, num_losses + 1
        ended = lose_everywhere(logs, epoch)
        assert ended[logs.index(innocent)] == []
        if ended[logs.index(guilty)]:
            break
        # Whoever is there without the poison makes a token.
        if innocent.num_unfinished(0) and not guilty.num_unfinished(0):
            assert guilty.awaits_trial_elsewhere
            assert accept(innocent, tokens("innocent", 5, attempt=num_losses))
            for request in guilty.replayable():
                guilty.replayed(request.request_id, 0)
        assert num_losses < 6
    else:
        raise AssertionError("the poison is gone without a verdict")

    assert guilty.is_blamed(make_request())
    assert not innocent.is_blamed(make_request("later", prompt=(9,)))
    assert num_losses <= 4


def test_a_request_that_is_alone_among_several_front_ends_is_blamed_as_soon_as_with_one() -> None:
    logs = two_logs()
    logs[1].admit(make_request("done", prompt=(9,)), 0)
    accept(logs[1], tokens("done", 5, last=True))
    logs[0].admit(make_request("poison"), 0)

    assert lose_everywhere(logs, 1) == [[], []]
    ended, nothing = lose_everywhere(logs, 2)

    assert [output.is_poisonous for output in ended] == [True]
    assert nothing == []


def test_what_others_have_blamed_is_refused_and_ended_where_it_waits(log: ReplayLog) -> None:
    culprit = ReplayLog(wait_s=30.0)
    culprit.admit(make_request(), 0)
    lose_and_replay(culprit, 0)
    lose_and_replay(culprit, 0)
    log.admit(make_request("equal"), 0)
    log.admit(make_request("other", prompt=(9,)), 0)
    log.lose(0, now=1.0)

    (error,) = log.learn(culprit.take_blamed())

    assert (error.request_id, error.is_poisonous) == ("equal", True)
    assert log.is_blamed(make_request("later"))
    assert [request.request_id for request in log.replayable()] == ["other"]
    assert culprit.take_blamed() == log.take_blamed() == []
    log.check_invariants()
