"""When snapshots go out, and what is in them."""

from phalanx.cluster.load_table import FORGET_AFTER_S, MIN_INTERVAL_S, REST_INTERVAL_S, LoadTable
from support.cluster import make_stats


def test_the_first_snapshot_is_due_at_once() -> None:
    assert LoadTable().publish(0.0) is not None


def test_a_change_is_published_soon_but_not_more_often_than_the_interval() -> None:
    table = LoadTable()
    table.publish(0.0)
    table.report(make_stats(0))

    assert table.publish(MIN_INTERVAL_S / 2) is None
    snapshot = table.publish(MIN_INTERVAL_S)
    assert snapshot is not None
    assert [stats.dp_rank for stats in snapshot.stats] == [0]


def test_at_rest_a_snapshot_goes_out_now_and_then() -> None:
    table = LoadTable()
    table.publish(0.0)

    assert table.publish(REST_INTERVAL_S - 0.01) is None
    assert table.publish(REST_INTERVAL_S) is not None


def test_an_older_report_is_counted_and_dropped() -> None:
    table = LoadTable()
    table.report(make_stats(0, sequence=5, num_running=5))
    table.report(make_stats(0, sequence=4, num_running=4))

    snapshot = table.publish(0.0)
    assert snapshot is not None
    assert [stats.num_running for stats in snapshot.stats] == [5]
    assert table.num_outdated == 1


def test_a_new_epoch_is_newer_although_it_counts_from_one() -> None:
    table = LoadTable()
    table.report(make_stats(0, epoch=0, sequence=900))
    table.report(make_stats(0, epoch=1, sequence=1, num_running=1))

    snapshot = table.publish(0.0)
    assert snapshot is not None
    assert snapshot.stats[0].epoch == 1


def test_a_replica_that_went_silent_is_left_out() -> None:
    table = LoadTable()
    table.report(make_stats(0, reported_at=0.0))
    table.report(make_stats(1, reported_at=FORGET_AFTER_S))

    snapshot = table.publish(FORGET_AFTER_S + 1)
    assert snapshot is not None
    assert [stats.dp_rank for stats in snapshot.stats] == [1]
