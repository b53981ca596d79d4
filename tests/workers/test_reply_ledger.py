"""Answers and the calls they belong to."""

import pytest

from phalanx.shm.codec import FrameHeader, FrameKind
from phalanx.workers.calls import KVCacheInitialized, WorkerFailure
from phalanx.workers.reply_ledger import ReplyLedger


def reply(call_id: int, rank: int, epoch: int = 1) -> FrameHeader:
    return FrameHeader(epoch=epoch, call_id=call_id, rank=rank, kind=FrameKind.REPLY)


def failure(rank: int, *, is_fatal: bool) -> WorkerFailure:
    return WorkerFailure(
        tp_rank=rank, phase="forward", error="no", traceback="", failed_at=1.0, is_fatal=is_fatal
    )


ANSWER = KVCacheInitialized(0.5)


def test_a_call_is_done_when_all_awaited_ranks_have_answered() -> None:
    ledger = ReplyLedger(epoch=1)
    call = ledger.expect(1, {0, 1}, 0.0)
    ledger.accept(reply(1, 1), ANSWER)
    assert not call.is_done
    ledger.accept(reply(1, 0), ANSWER)

    assert call.is_done
    assert call.replies == {0: ANSWER, 1: ANSWER}
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
    ledger.forget(ledger.expect(1, {0}, 0.0))
    ledger.accept(reply(1, 0), ANSWER)

    assert (ledger.num_pending, ledger.num_dropped) == (0, 1)


def test_a_hook_that_fails_on_one_rank_is_over_and_its_other_answers_are_stale() -> None:
    ledger = ReplyLedger(epoch=1)
    call = ledger.expect(1, {0, 1}, 0.0)
    ledger.accept(reply(1, 1), failure(1, is_fatal=False))
    ledger.accept(reply(1, 0), ANSWER)

    assert call.is_done
    assert call.failure == failure(1, is_fatal=False)
    assert ledger.num_dropped == 1


def test_a_fatal_failure_counts_whoever_awaits_what() -> None:
    ledger = ReplyLedger(epoch=1)
    ledger.expect(1, {0}, 0.0)
    ledger.accept(reply(1, 1), failure(1, is_fatal=True))

    assert ledger.fatal == [failure(1, is_fatal=True)]
    assert ledger.num_dropped == 0
