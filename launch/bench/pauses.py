"""The pauses of streams, and the deaths that lay in them. Pure.

Called by: torture.py. A pause that a death explains says what that death costs; one that none explains is a finding.
"""

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from .openai_client import RequestRecord
from .report import Table, show_number
from .stats import summarize

_MAX_LAG_S = 0.5
"""What the dead had sent may still arrive for so long: the pause of its death begins after it."""
_MAX_ROWS = 10


class Pauses(msgspec.Struct, frozen=True, kw_only=True):
    """The longest wait for a piece, or the first, of each stream, in milliseconds."""

    p50: float
    p99: float
    max: float


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was killed. at_s: since the killing began."""

    victim: str
    at_s: float


class SlowPauses(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses longer than any undisturbed one, of streams that ended well, in which the same deaths lay.

    deaths:      in the order of time; empty: nobody died then
    num_streams: that paused so; num_first: of them, those that waited for their first piece
    began_at_s:  the longest one, since the killing began; longest_s: how long it was
    """

    deaths: list[Death]
    num_streams: int
    num_first: int
    began_at_s: float
    longest_s: float


class _Pause(msgspec.Struct, frozen=True):
    began_at: float
    ended_at: float
    is_first: bool

    @property
    def length_s(self) -> float:
        return self.ended_at - self.began_at


def longest_pause_s(record: RequestRecord) -> float:
    """Return the longest time that the client of a stream waited for the next piece, or for the first."""
    return _longest(record).length_s


def measure_pauses(records: Iterable[RequestRecord]) -> Pauses:
    """Summarise the longest pause of each stream."""
    summary = summarize(1000 * longest_pause_s(record) for record in records)
    return Pauses(p50=summary.p50, p99=summary.p99, max=summary.max)


def explain_pauses(
    records: Iterable[RequestRecord], deaths: Sequence[Death], *, began_at: float, longer_than_s: float
) -> list[SlowPauses]:
    """Group the streams' longest pauses, if longer than that, by the deaths that lay in them; the longest first.

    began_at: `time.perf_counter()` when the killing began
    """
    groups: dict[tuple[int, ...], list[_Pause]] = {}
    for pause in map(_longest, records):
        if pause.length_s > longer_than_s:
            within = tuple(
                number
                for number, death in enumerate(deaths)
                if pause.began_at - _MAX_LAG_S <= began_at + death.at_s <= pause.ended_at
            )
            groups.setdefault(within, []).append(pause)
    slow = []
    for within, pauses in groups.items():
        longest = max(pauses, key=lambda pause: pause.length_s)
        slow.append(
            SlowPauses(
                deaths=[deaths[number] for number in within],
                num_streams=len(pauses),
                num_first=sum(pause.is_first for pause in pauses),
                began_at_s=longest.began_at - began_at,
                longest_s=longest.length_s,
            )
        )
    return sorted(slow, key=lambda group: group.longest_s, reverse=True)


def make_table(slow: Sequence[SlowPauses]) -> Table:
    """Lay out the slowest ones."""
    rows = []
    for group in slow[:_MAX_ROWS]:
        deaths = ", ".join(f"{death.victim} at {death.at_s:.1f} s" for death in group.deaths) or "none"
        numbers = (f"{group.num_streams}", f"{group.num_first}", f"{group.began_at_s:.1f}")
        rows.append([deaths, *numbers, show_number(1000 * group.longest_s)])
    return Table(
        title="Slowest pauses",
        columns=[
            "deaths in the pause",
            "streams",
            "of them before the first piece",
            "began at, s",
            "longest, ms",
        ],
        rows=rows,
        note="Pauses longer than any undisturbed one, by the deaths that lay in them.",
    )


def _longest(record: RequestRecord) -> _Pause:
    instants = [record.sent_at, *record.token_at]
    waits = (
        _Pause(before, after, number == 0)
        for number, (before, after) in enumerate(itertools.pairwise(instants))
    )
    return max(waits, key=lambda pause: pause.length_s, default=_Pause(record.sent_at, record.sent_at, True))
