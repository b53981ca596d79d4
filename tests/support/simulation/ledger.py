"""What clients asked and got, and what they may get: the judge of a simulated cluster.

It knows nothing of how the cluster works, only what a client may rely on: every token once and in order, one end for
each request, an error only with a cause, and nobody called poisonous who was not there when two replicas died.
"""

from dataclasses import dataclass, field

from phalanx.engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason

from .schedule import NO_POISON, Happening

_TOKEN = 1000
_EPSILON = 1e-6


def token_of(content: int, position: int) -> int:
    """The model: which token a request makes at a position."""
    return _TOKEN + content * 31 + position


class Violation(AssertionError):
    """The cluster did what it must not do."""


@dataclass(slots=True)
class Record:
    """One request as its client sees it.

    sent_at:  when it was sent last, or asked
    attempts: what each attempt that was sent had brought before and brought itself, in tokens
    is_late:  it came to a replica after its front end had died and the next one had said hello. It runs there to
              its end, and its outputs are nobody's
    """

    asked: Happening
    tokens: list[int] = field(default_factory=list)
    ended: str | None = None
    incarnation: int = -1
    attempts: list[list[int]] = field(default_factory=list)
    sent_at: float = 0.0
    is_late: bool = False
    expected: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = [token_of(self.asked.content, position) for position in range(self.asked.num_tokens)]

    @property
    def is_suspect(self) -> bool:
        """Two attempts in a row brought nothing."""
        return len(self.attempts) >= 2 and self.attempts[-1][1] == self.attempts[-2][1] == 0

    def end(self, how: str) -> None:
        if self.ended is not None:
            raise Violation(f"request {self.asked.number} ended twice: {self.ended}, then {how}")
        self.ended = how


class Ledger:
    """All requests of one run.

    has_one_culprit: replicas die of poison only, all poison asks the same, and it kills before it makes a token
    """

    def __init__(self, *, wait_s: float, has_one_culprit: bool) -> None:
        self.records: dict[str, Record] = {}
        self.is_stopping = False
        self._wait_s = wait_s
        self._has_one_culprit = has_one_culprit

    def ask(self, asked: Happening) -> Record:
        record = self.records[f"r{asked.number}"] = Record(asked)
        return record

    def leave(self, request_id: str) -> None:
        record = self.records.get(request_id)
        if record is not None and record.ended is None:
            record.end("left")

    def refused(self, record: Record, *, num_useful: int) -> None:
        """num_useful: replicas that serve or will do so again, as far as the front end can know."""
        if num_useful and not self.is_stopping:
            raise Violation(
                f"request {record.asked.number} was refused, with {num_useful} replicas to wait for"
            )
        record.end("refused")

    def refused_as_poison(self, record: Record) -> None:
        if not self._was_blamed(record):
            raise Violation(
                f"request {record.asked.number} was refused as poisonous, and none like it ever was"
            )
        record.end("refused")

    def sent(self, request: EngineCoreRequest, now: float) -> None:
        """A front end sends a request to a replica."""
        record = self.records[request.request_id]
        name = f"request {record.asked.number}"
        if record.ended is not None:
            raise Violation(f"{name} is sent again after its end: {record.ended}")
        if request.output_token_ids != record.tokens:
            raise Violation(
                f"{name} continues from {request.output_token_ids}, its client has {record.tokens}"
            )
        if record.attempts and request.attempt <= record.attempts[-1][0]:
            raise Violation(f"{name} is sent again as attempt {request.attempt}")
        record.attempts.append([request.attempt, 0])
        record.sent_at = now

    def got(self, output: EngineCoreOutput, now: float, none_ready_at: float) -> None:
        """A front end hands an output to the client.

        none_ready_at: when the front end last knew of no replica that serves
        """
        record = self.records[output.request_id]
        name = f"request {record.asked.number}"
        if record.ended is not None:
            raise Violation(f"{name} gets an output after its end: {record.ended}")
        record.tokens += output.new_token_ids
        if record.tokens != record.expected[: len(record.tokens)]:
            raise Violation(f"{name} got {record.tokens}, not {record.expected}")
        if output.new_token_ids:
            record.attempts[-1][1] += len(output.new_token_ids)
        match output.finish_reason:
            case None:
                return
            case FinishReason.LENGTH:
                if record.tokens != record.expected:
                    raise Violation(f"{name} ended with {record.tokens}, not {record.expected}")
                record.end("done")
            case FinishReason.ABORT if self.is_stopping:
                record.end("stopped")
            case FinishReason.ERROR if output.is_poisonous:
                self._judge(record, name)
                record.end("poisonous")
            case FinishReason.ERROR:
                has_waited = now - record.sent_at >= self._wait_s - _EPSILON
                # One that may have killed its replica waits for its turn to be tried.
                is_unclear = bool(record.attempts) and record.attempts[-1][1] == 0
                has_reason = none_ready_at >= now - self._wait_s - _EPSILON or is_unclear
                if not (has_waited and has_reason):
                    raise Violation(f"{name} ended with an error: {output.error}")
                record.end("expired")
            case reason:
                raise Violation(f"{name} ended with {reason}")

    def front_end_died(self, incarnation: int) -> None:
        """Its connections broke."""
        for record in self.records.values():
            if record.incarnation == incarnation and record.ended is None:
                record.end("connection lost")

    def check_all_ended(self) -> None:
        for record in self.records.values():
            if record.ended is None:
                raise Violation(f"request {record.asked.number} never ended")

    def _was_blamed(self, record: Record) -> bool:
        return any(
            other.ended == "poisonous" and other.asked.question == record.asked.question
            for other in self.records.values()
        )

    def _judge(self, record: Record, name: str) -> None:
        if not record.is_suspect and not self._was_blamed(record):
            raise Violation(f"{name} is called poisonous, and made progress: {record.attempts}")
        if self._has_one_culprit and record.asked.poison_at == NO_POISON:
            raise Violation(f"{name} is called poisonous, and another one was")
