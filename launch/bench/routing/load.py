"""Loads of the routing benchmark: requests with the blocks that they share, from traces or made up. Pure.

Called by: the benchmark's command and its tests. A block is named by a key of eight bytes, as in the balancer's index;
equal keys mean equal prefixes. Sessions are closed loops: a turn comes a while after the answer to the one before it.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ....engine.prefix_log import KEY_BYTES
from ..traces import BLOCK_TOKENS, TraceRequest

SMALL_BLOCK_TOKENS = 64
"""Of loads that are made up. Larger than a real block, so that hours are simulated in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """One request.

    keys:      of the full blocks of prompt and output; the first `num_prompt_blocks` are the prompt's
    think_s:   from the end of this request to `follow_up`, the next turn of its session
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    keys: tuple[bytes, ...] = ()
    num_prompt_blocks: int = 0
    session_id: str = ""
    think_s: float = 0.0
    follow_up: "SimRequest | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """What chats are like. Lengths in blocks: from the first to below the second, each as likely.

    skew:         the system prompt of rank k is asked for in proportion to k ** -skew; 0: all as often
    output:       draws how many tokens an answer has
    mean_think_s: from an answer to the next turn
    """

    block_tokens: int
    num_systems: int
    system_blocks: tuple[int, int]
    user_blocks: tuple[int, int]
    output: Callable[[random.Random], int]
    mean_think_s: float
    skew: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What arrives. arrivals: (seconds, request), in order of time; block_tokens: what one key stands for."""

    name: str
    block_tokens: int
    arrivals: tuple[tuple[float, SimRequest], ...]

    @property
    def num_requests(self) -> int:
        """Requests in all, the later turns of sessions included."""
        return sum(1 for _, first in self.arrivals for _ in turns(first))


def turns(first: SimRequest) -> Iterator[SimRequest]:
    """All requests of a session, from its first one on."""
    request: SimRequest | None = first
    while request is not None:
        yield request
        request = request.follow_up


def from_trace(name: str, trace: Sequence[TraceRequest], rate: float) -> Load:
    """A trace as a load, brought to `rate` requests a second on average."""
    duration = max(request.arrival_s for request in trace) or 1.0
    factor = duration * rate / len(trace)
    arrivals = [
        (
            request.arrival_s / duration * duration / factor,
            SimRequest(
                request_id=f"{name}-{number}",
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                keys=tuple(number_key(block) for block in request.block_hashes),
                num_prompt_blocks=len(request.block_hashes),
                session_id=str(request.block_hashes[1]) if len(request.block_hashes) > 1 else str(number),
            ),
        )
        for number, request in enumerate(trace)
    ]
    return Load(name=name, block_tokens=BLOCK_TOKENS, arrivals=tuple(arrivals))


def number_key(number: int) -> bytes:
    """Name block number `number`."""
    return number.to_bytes(KEY_BYTES, "little")


def multi_turn(num_requests: int, rate: float, seed: int) -> Load:
    """Chats: a system prompt of a few, then turns that each begin with all that was said before."""
    return chats("multi-turn", num_requests, rate, seed, CHATS)


def tenant_chats(num_requests: int, rate: float, seed: int) -> Load:
    """Chats of many tenants, whose system prompts have 2000 to 8000 tokens: more than one replica can keep."""
    return chats("tenant-chats", num_requests, rate, seed, TENANT_CHATS)


def chats(name: str, num_requests: int, rate: float, seed: int, shape: ChatShape) -> Load:
    """Chats of a shape. Requests come at `rate` once as many chats end as begin."""
    rng = random.Random(f"{name}/{seed}")
    namer = _Namer()
    systems = [namer.take(rng.randrange(*shape.system_blocks)) for _ in range(shape.num_systems)]
    weights = [rank**-shape.skew for rank in range(1, len(systems) + 1)]
    arrivals: list[tuple[float, SimRequest]] = []
    now, count = 0.0, 0
    while count < num_requests:
        num_turns = min(1 + int(rng.expovariate(1 / 5)), 16)
        system = rng.choices(systems, weights)[0] if shape.skew else rng.choice(systems)
        arrivals.append((now, _session(f"chat-{len(arrivals)}", num_turns, system, shape, namer, rng)))
        count += num_turns
        # Sessions begin at such a rate that requests come at `rate`.
        now += rng.expovariate(rate / 5.5)
    return Load(name=name, block_tokens=shape.block_tokens, arrivals=tuple(arrivals))


def shared_prefix(num_requests: int, rate: float, seed: int) -> Load:
    """Many tenants with long system prompts, and short questions: more prefixes than one replica can keep."""
    rng = random.Random(f"shared-prefix/{seed}")
    namer = _Namer()
    prefixes = [namer.take(rng.randrange(64, 128)) for _ in range(512)]
    # A few tenants ask most: weights fall as 1 / rank.
    weights = [1 / (rank + 1) ** 0.6 for rank in range(len(prefixes))]
    arrivals, now = [], 0.0
    for number, index in enumerate(rng.choices(range(len(prefixes)), weights, k=num_requests)):
        own = namer.take(rng.randrange(1, 8))
        arrivals.append(
            (now, _request(f"q-{number}", (*prefixes[index], *own), _short(rng), namer, session=str(index)))
        )
        now += rng.expovariate(rate)
    return Load(name="shared-prefix", block_tokens=SMALL_BLOCK_TOKENS, arrivals=tuple(arrivals))


def heavy_tail(num_requests: int, rate: float, seed: int) -> Load:
    """No reuse, and lengths over three orders of magnitude."""
    rng = random.Random(f"heavy-tail/{seed}")
    return _without_reuse(
        "heavy-tail",
        num_requests,
        rng,
        gap=lambda: rng.expovariate(rate),
        prompt=lambda: min(int(rng.lognormvariate(6.2, 1.6)) + 16, 60_000),
    )


def burst(num_requests: int, rate: float, seed: int) -> Load:
    """No reuse, and everything at once: nobody's numbers are of any use yet."""
    rng = random.Random(f"burst/{seed}")
    return _without_reuse(
        "burst",
        num_requests,
        rng,
        gap=lambda: 0.0,
        prompt=lambda: min(int(rng.lognormvariate(6.5, 1.0)) + 16, 20_000),
    )


def no_reuse(num_requests: int, rate: float, seed: int) -> Load:
    """No reuse, ordinary lengths, Poisson arrivals."""
    rng = random.Random(f"no-reuse/{seed}")
    return _without_reuse(
        "no-reuse",
        num_requests,
        rng,
        gap=lambda: rng.expovariate(rate),
        prompt=lambda: min(int(rng.lognormvariate(6.5, 0.8)) + 16, 20_000),
    )


MADE_UP: Mapping[str, Callable[[int, float, int], Load]] = {
    "multi-turn": multi_turn,
    "tenant-chats": tenant_chats,
    "shared-prefix": shared_prefix,
    "heavy-tail": heavy_tail,
    "burst": burst,
    "no-reuse": no_reuse,
}
"""By name: (requests, requests a second, seed) to a load."""


class _Namer:
    """Gives out names that nobody else has."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> tuple[bytes, ...]:
        first, self._next = self._next, self._next + count
        return tuple(number_key(number) for number in range(first, self._next))


def _short(rng: random.Random) -> int:
    return min(int(rng.lognormvariate(5.0, 0.7)) + 1, 2000)


CHATS = ChatShape(
    block_tokens=SMALL_BLOCK_TOKENS,
    num_systems=8,
    system_blocks=(8, 24),
    user_blocks=(1, 10),
    output=_short,
    mean_think_s=8.0,
)
TENANT_CHATS = ChatShape(
    block_tokens=SMALL_BLOCK_TOKENS,
    num_systems=512,
    system_blocks=(32, 128),
    user_blocks=(1, 8),
    output=_short,
    mean_think_s=8.0,
    skew=0.6,
)


def _request(
    request_id: str,
    prompt: tuple[bytes, ...],
    num_output_tokens: int,
    namer: _Namer,
    *,
    session: str,
    block_tokens: int = SMALL_BLOCK_TOKENS,
) -> SimRequest:
    """A prompt of whole blocks and one token more; the output's full blocks are named as well.

    The last token of an output is never computed on, so with that one token the output begins a block of its own.
    """
    num_output_blocks = num_output_tokens // block_tokens
    return SimRequest(
        request_id=request_id,
        num_prompt_tokens=len(prompt) * block_tokens + 1,
        num_output_tokens=num_output_tokens,
        keys=(*prompt, *namer.take(num_output_blocks)),
        num_prompt_blocks=len(prompt),
        session_id=session,
    )


def _session(
    name: str,
    num_turns: int,
    system: tuple[bytes, ...],
    shape: ChatShape,
    namer: _Namer,
    rng: random.Random,
) -> SimRequest:
    said = system
    made = []
    for number in range(num_turns):
        prompt = (*said, *namer.take(rng.randrange(*shape.user_blocks)))
        num_output_tokens = shape.output(rng)
        request = _request(
            f"{name}-{number}",
            prompt,
            num_output_tokens,
            namer,
            session=name,
            block_tokens=shape.block_tokens,
        )
        made.append(replace(request, think_s=rng.expovariate(1 / shape.mean_think_s)))
        said = request.keys
    last: SimRequest | None = None
    for request in reversed(made):
        last = replace(request, follow_up=last)
    assert last is not None
    return last


def _without_reuse(
    name: str,
    num_requests: int,
    rng: random.Random,
    *,
    gap: Callable[[], float],
    prompt: Callable[[], int],
) -> Load:
    arrivals, now = [], 0.0
    for number in range(num_requests):
        arrivals.append(
            (
                now,
                SimRequest(
                    request_id=f"{name}-{number}",
                    num_prompt_tokens=prompt(),
                    num_output_tokens=_short(rng),
                    session_id=str(number),
                ),
            )
        )
        now += gap()
    return Load(name=name, block_tokens=SMALL_BLOCK_TOKENS, arrivals=tuple(arrivals))
