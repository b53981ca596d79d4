"""What front ends tell each other at once: connections, requests that no report counts, trials, suspects."""

import pytest

from phalanx.cluster.front_end_board import NUM_COLUMNS, FrontEndBoard, Unreported
from phalanx.shm.number_table import NumberTable


@pytest.fixture
def table() -> NumberTable:
    return NumberTable.private(3, NUM_COLUMNS)


@pytest.fixture
def boards(table: NumberTable) -> list[FrontEndBoard]:
    return [FrontEndBoard(table, index) for index in range(3)]


def test_only_servers_that_accept_are_left_connections(boards: list[FrontEndBoard]) -> None:
    boards[0].set_connections(3, accepts=True)
    boards[1].set_connections(1, accepts=True)

    assert boards[0].num_with_fewer(3) == 1
    assert boards[1].num_with_fewer(1) == 0
    boards[1].set_connections(1, accepts=False)
    assert boards[0].num_with_fewer(3) == 0


def test_what_no_report_counts_is_summed_over_all_others(boards: list[FrontEndBoard]) -> None:
    for board, count in zip(boards, (5, 2, -1), strict=True):
        board.set_unreported(1, Unreported(prefill_tokens=100 * count, num_requests=count, num_tokens=7))

    found = [board.unreported_elsewhere(3) for board in boards]
    assert [len(each) for each in found] == [3, 3, 3]
    assert [each[1] for each in found] == [(100, 1, 14), (400, 4, 14), (700, 7, 14)]
    assert all(each[rank] == Unreported() for each in found for rank in (0, 2))
    assert FrontEndBoard.alone().unreported_elsewhere(3) == ()


def test_of_two_trials_that_begin_at_once_the_later_front_end_gives_way(boards: list[FrontEndBoard]) -> None:
    boards[0].set_trial(-1)
    boards[2].set_trial(-1)

    assert not boards[0].is_trial_elsewhere(is_ours_on=True)
    assert boards[2].is_trial_elsewhere(is_ours_on=True)
    assert boards[1].is_trial_elsewhere()
    assert boards[1].trials_elsewhere() == set()

    boards[2].set_trial(None)
    boards[0].set_trial(0)
    assert boards[1].trials_elsewhere() == boards[2].trials_elsewhere() == {0}
    assert boards[0].trials_elsewhere() == set()
    boards[0].set_trial(None)
    assert not boards[1].is_trial_elsewhere()


def test_who_hears_late_of_a_loss_still_learns_what_others_had_there(boards: list[FrontEndBoard]) -> None:
    boards[0].set_unclear(4, epoch=0, num_requests=2)
    assert boards[1].is_unclear_elsewhere(4, epoch=0)
    assert not boards[0].is_unclear_elsewhere(4, epoch=0)
    assert not boards[1].is_unclear_elsewhere(5, epoch=0)

    boards[0].set_unclear(4, epoch=1, num_requests=0)

    assert boards[1].is_unclear_elsewhere(4, epoch=0)
    assert not boards[1].is_unclear_elsewhere(4, epoch=1)
    boards[0].set_unclear(4, epoch=2, num_requests=0)
    assert not boards[1].is_unclear_elsewhere(4, epoch=0)


def test_a_front_end_that_has_ended_stands_in_nobodys_way(
    table: NumberTable, boards: list[FrontEndBoard]
) -> None:
    boards[1].set_trial(3)
    boards[1].set_unreported(3, Unreported(num_requests=7))
    boards[1].set_unclear(3, epoch=0, num_requests=1)
    boards[1].set_connections(0, accepts=True)

    table.clear(1)

    assert not boards[0].is_trial_elsewhere()
    assert set(boards[0].unreported_elsewhere(4)) == {Unreported()}
    assert not boards[0].is_unclear_elsewhere(3, epoch=0)
    assert boards[0].num_with_fewer(9) == 0
