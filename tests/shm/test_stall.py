"""When a wait is worth a report."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.shm.stall import StallDetector


def test_a_report_is_due_once_after_the_budget_then_after_twice_as_long() -> None:
    detector = StallDetector(10.0, now=100.0)

    due = [now for now in range(100, 200) if detector.is_due(float(now))]
    assert due == [110, 130, 170]


def test_what_moves_begins_the_wait_anew() -> None:
    detector = StallDetector(10.0, now=0.0)
    assert detector.is_due(10.0)
    detector.restart(12.0)

    assert not detector.is_due(21.9)
    assert detector.is_due(22.0)
    assert not detector.is_due(41.9)
    assert detector.is_due(42.0)


def test_a_waiter_that_overslept_makes_one_report() -> None:
    detector = StallDetector(1.0, now=0.0)

    assert detector.is_due(1000.0)
    assert not detector.is_due(1000.0)
    assert detector.next_report_at == 1002.0


@given(st.lists(st.floats(0.0, 50.0), max_size=60))
def test_reports_of_one_wait_are_at_least_the_budget_and_ever_further_apart(pauses: list[float]) -> None:
    detector = StallDetector(5.0, now=0.0)
    now, reported_at, gaps = 0.0, 0.0, []
    for pause in pauses:
        now += pause
        if detector.is_due(now):
            gaps.append(now - reported_at)
            reported_at = now

    assert all(gap >= 5.0 * 2**index for index, gap in enumerate(gaps))
