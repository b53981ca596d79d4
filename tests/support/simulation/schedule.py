"""What happens to one simulated cluster: all of it follows from a seed."""

import random
from dataclasses import dataclass
from enum import StrEnum

NO_POISON = -1


class Kind(StrEnum):
    """What happens."""

    ASK = "ask"
    LEAVE = "leave"
    """The client of a request goes away."""
    CRASH = "crash"
    """A process dies."""
    TERMINATE = "terminate"
    """Somebody asks an engine core to leave, and tells nobody: it aborts what it has, and leaves."""
    HALT = "halt"
    """A worker of a replica dies: its engine core makes no step any more, and ends a little later."""
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happens. `role` of the process, or `number` of the request that it happens to.

    content:    requests of the same content ask the same
    num_tokens: that the request makes
    poison_at:  the position whose computation kills the replica; NO_POISON: none does
    """

    at: float
    kind: Kind
    role: str = ""
    number: int = -1
    content: int = -1
    num_tokens: int = 0
    poison_at: int = NO_POISON

    @property
    def question(self) -> tuple[int, int, int]:
        """Equal for requests that ask the same."""
        return self.content, self.num_tokens, self.poison_at


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run. Durations in seconds of virtual time.

    max_delay_s:  of a message
    step_s:       about how long a step takes
    start_s:      about how long a process takes to be ready
    notice_s:     how long the supervisor may take to see a death
    wait_s:       how long a lost request waits for a replica
    max_restarts: of one process
    """

    seed: int
    num_replicas: int
    max_delay_s: float
    step_s: float
    start_s: float
    notice_s: float
    wait_s: float
    max_restarts: int
    happenings: tuple[Happening, ...]

    @property
    def is_undisturbed(self) -> bool:
        """True when replicas die of poison only, and the front end lives as long as the cluster."""
        return not any(
            event.kind in (Kind.HALT, Kind.TERMINATE, Kind.STOP)
            or (event.kind is Kind.CRASH and event.role != "coordinator")
            for event in self.happenings
        )

    @property
    def has_one_culprit(self) -> bool:
        """True when replicas die of one question only, and before it has made a token."""
        poison = {event.question for event in self.happenings if event.poison_at != NO_POISON}
        return self.is_undisturbed and len(poison) == 1 and all(poison_at == 0 for _, _, poison_at in poison)

    @property
    def num_deadly_tokens(self) -> int:
        """Tokens up to and with the one that kills, of all poisonous requests."""
        return sum(event.poison_at + 1 for event in self.happenings)


def make_schedule(seed: int) -> Schedule:
    """Draw a schedule: a few requests, a few of which are poison, and a few deaths in the middle of them."""
    rng = random.Random(seed)
    num_replicas = rng.choice((1, 2, 2, 3))
    max_delay_s = rng.choice((0.01, 0.1, 0.4))
    start_s = rng.choice((0.3, 1.0, 3.0))
    has_poison = rng.random() < 0.3
    # From before the start's end to a little after, then in bursts: most bugs need two things at one time.
    bursts = [start_s * (0.8 + 2.2 * rng.random()) for _ in range(rng.choice((1, 2, 3)))]

    def instant() -> float:
        return rng.choice(bursts) + rng.random() * rng.choice((0.05, 0.5, 2.0))

    events = []
    num_requests = rng.randint(2, 6)
    for number in range(num_requests):
        poison_at = NO_POISON
        if has_poison and rng.random() < 0.3:
            poison_at = rng.choice((0, 0, 2))
        content = rng.randrange(number) if number and poison_at >= 0 and rng.random() < 0.3 else number
        num_tokens = rng.randint(3, 6) if poison_at >= 0 else rng.randint(1, 6)
        events.append(Happening(instant(), Kind.ASK, "", number, content, num_tokens, poison_at))
        if rng.random() < 0.15:
            events.append(Happening(events[-1].at + rng.random(), Kind.LEAVE, "", number))
    roles = [f"dp{rank}" for rank in range(num_replicas)]
    if rng.random() < (0.3 if has_poison else 0.9):
        for _ in range(rng.choice((1, 1, 2, 3, 4))):
            luck = rng.random()
            if luck < 0.5:
                events.append(Happening(instant(), Kind.CRASH, rng.choice(roles)))
            elif luck < 0.75:
                kind = Kind.HALT if luck < 0.65 else Kind.TERMINATE
                events.append(Happening(instant(), kind, rng.choice(roles)))
            else:
                events.append(Happening(instant(), Kind.CRASH, "api0" if luck < 0.9 else "coordinator"))
    if rng.random() < 0.1:
        events.append(Happening(instant() + 0.5, Kind.STOP))
    return Schedule(
        seed=seed,
        num_replicas=num_replicas,
        max_delay_s=max_delay_s,
        step_s=rng.choice((0.02, 0.1)),
        start_s=start_s,
        notice_s=rng.choice((0.01, 0.2)),
        wait_s=rng.choice((1.0, 4.0, 60.0)),
        max_restarts=rng.choice((1, 3, 50, 50)),
        happenings=tuple(sorted(events, key=lambda event: event.at)),
    )
