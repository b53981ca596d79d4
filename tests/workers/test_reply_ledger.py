"""Answers and the calls they belong to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.shm.codec import FrameHeader, FrameKind
from phalanx.workers.calls import KVCacheInitialized, WorkerFailure
from phalanx.workers.reply_ledger import ReplyLedger


def reply(call_id: int, rank: int, epoch: int = 1) -> FrameHeader:
    return FrameHeader(epoch=epoch, call_id=call_id, rank=rank, kind=FrameKind.REPLY)


ANSWER = KVCacheInitialized(0.5)
FAILURE = WorkerFailure(tp_rank=1, call_id=1, phase="hook", error="no", traceback="", failed_at=1.0)


def test_a_call_is_done_when_all_awaited_ranks_have_answered() -> None:
    ledger = ReplyLedger(epoch=1)
    call = ledger.expect(1, {0, 1}, 0.0)
    ledger.accept(reply(1, 1), ANSWER)
    assert not call.is_done
    ledger.accept(reply(1, 0), ANSWER)

    assert call.is_done
    assert call.answers == {0: ANSWER, 1: ANSWER}
    assert (ledger.num_pending, ledger.num_dropped) == (0, 0)


@pytest.mark.parametrize("header", [reply(2, 0), reply(1, 0, epoch=0), reply(1, 5)])
def test_an_answer_of_another_call_epoch_or_rank_is_dropped(header: FrameHeader) -> None:
    ledger = ReplyLedger(epoch=1)
    call = ledger.expect(1, {0}, 0.0)
    ledger.accept(header, ANSWER)

    assert not call.is_done
    assert ledger.num_dropped == 1


def test_a_second_answer_of_a_rank_is_dropped() -> None:
    ledger = ReplyLedger(epoch=1)
    ledger.expect(1, {0, 1}, 0.0)
    ledger.accept(reply(1, 0), ANSWER)
    ledger.accept(reply(1, 0), ANSWER)

    assert ledger.num_dropped == 1


def test_an_answer_to_a_call_that_was_given_up_is_dropped() -> None:
    ledger = ReplyLedger(epoch=1)
    call = ledger.expect(1, {0}, 0.0)
    ledger.cancel(call)
    ledger.cancel(call)
    ledger.accept(reply(1, 0), ANSWER)

    assert call.is_done
    assert call.is_cancelled
    assert (ledger.num_pending, ledger.num_dropped) == (0, 1)


def test_a_rank_owes_its_answer_also_to_a_call_that_was_given_up() -> None:
    ledger = ReplyLedger(epoch=1)
    ledger.cancel(ledger.expect(1, {0}, 0.0))

    assert [ledger.owes(rank) for rank in (0, 1)] == [True, False]
    ledger.accept(reply(1, 0), ANSWER)
    assert not ledger.owes(0)


def test_a_call_that_is_done_cannot_be_given_up() -> None:
    ledger = ReplyLedger(epoch=1)
    call = ledger.expect(1, {0}, 0.0)
    ledger.accept(reply(1, 0), ANSWER)
    ledger.cancel(call)

    assert not call.is_cancelled
    assert call.answers == {0: ANSWER}


def test_a_failure_on_one_rank_is_its_answer_and_the_others_are_awaited() -> None:
    ledger = ReplyLedger(epoch=1)
    call = ledger.expect(1, {0, 1}, 0.0)
    ledger.accept(reply(1, 1), FAILURE)
    assert not call.is_done
    ledger.accept(reply(1, 0), ANSWER)

    assert call.is_done
    assert call.answers == {0: ANSWER, 1: FAILURE}


@given(st.data())
def test_each_call_gets_its_own_answers_whatever_the_order(data: st.DataObject) -> None:
    ledger = ReplyLedger(epoch=1)
    num_ranks = data.draw(st.integers(1, 4))
    calls = [
        ledger.expect(call_id, set(range(num_ranks)), 0.0)
        for call_id in range(1, data.draw(st.integers(1, 5)) + 1)
    ]
    cancelled = [call for call in calls if data.draw(st.booleans())]
    frames = [(call.call_id, rank) for call in calls for rank in range(num_ranks)]
    for call in cancelled:
        ledger.cancel(call)
    for call_id, rank in data.draw(st.permutations(frames)):
        ledger.accept(reply(call_id, rank), KVCacheInitialized(call_id * 10 + rank))

    for call in calls:
        expected = (
            {}
            if call in cancelled
            else {rank: KVCacheInitialized(call.call_id * 10 + rank) for rank in range(num_ranks)}
        )
        assert call.answers == expected
    assert ledger.num_dropped == len(cancelled) * num_ranks
    assert ledger.num_pending == 0
    assert not any(ledger.owes(rank) for rank in range(num_ranks))
