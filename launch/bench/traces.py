"""Traces: when requests came to a real service, and how long they were; read from files, or made up alike. Pure.

Called by: workload.py. Formats are told apart by the first line: Azure's CSV (TIMESTAMP, ContextTokens,
GeneratedTokens) and Mooncake's JSON lines (timestamp in ms, input_length, output_length, hash_ids: one per 512
tokens of prompt, equal ids are equal text).

The made-up ones have the quantiles of length, the rate and the unevenness of arrivals (coefficient of variation of
the gaps) that were counted in Azure's LLM inference traces of 2023 (CC BY 4.0, Microsoft; Patel et al., Splitwise,
ISCA 2024) and in Mooncake's conversation trace (Apache-2.0; Qin et al., FAST 2025).
"""

import csv
import datetime
import io
import random
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from .errors import BenchError

BLOCK_TOKENS = 512
"""Tokens of prompt that one id of `block_hashes` stands for."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace.

    arrival_s:    since the first request
    block_hashes: what the prompt begins with, `BLOCK_TOKENS` tokens each; requests share what they have in common
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()


class TraceShape(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of a trace.

    rate:           requests per second
    gap_cv:         coefficient of variation of the gaps between arrivals; 1: Poisson
    quantile_parts: parts of the requests that are no longer than the lengths below
    reuse:          part of the requests that begin as an earlier one did
    """

    rate: float
    gap_cv: float
    quantile_parts: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    reuse: float = 0.0


_PARTS = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
SHAPES: Mapping[str, TraceShape] = {
    "azure-conversation": TraceShape(
        rate=5.53,
        gap_cv=1.09,
        quantile_parts=_PARTS,
        prompt_tokens=(2, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),
        output_tokens=(7, 41, 54, 85, 129, 395, 424, 451, 601, 1000),
    ),
    "azure-code": TraceShape(
        rate=2.57,
        gap_cv=13.15,
        quantile_parts=_PARTS,
        prompt_tokens=(3, 75, 147, 578, 1469, 2744, 5188, 7303, 7436, 7437),
        output_tokens=(6, 6, 7, 9, 13, 24, 55, 90, 251, 1899),
    ),
    "mooncake-conversation": TraceShape(
        rate=3.28,
        gap_cv=2.98,
        quantile_parts=_PARTS,
        prompt_tokens=(891, 901, 973, 2404, 7216, 15662, 27939, 40417, 89867, 124847),
        output_tokens=(1, 10, 24, 156, 356, 476, 605, 709, 1166, 2000),
        reuse=0.37,
    ),
}


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def parse_trace(text: str) -> list[TraceRequest]:
    """Read a trace's text; arrivals are counted from its first request. Raises BenchError when it is no trace."""
    try:
        requests = _parse_mooncake(text) if text.lstrip()[:1] == "{" else _parse_azure(text)
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise BenchError(f"the trace does not read: {type(error).__name__}: {error}") from None
    if not requests:
        raise BenchError("the trace holds no request")
    requests.sort(key=lambda request: request.arrival_s)
    began_at = requests[0].arrival_s
    return [msgspec.structs.replace(request, arrival_s=request.arrival_s - began_at) for request in requests]


def synthesize_trace(shape: TraceShape, num_requests: int, seed: int) -> list[TraceRequest]:
    """Make up `num_requests` requests with the statistics of `shape`; the same seed gives the same ones."""
    rng = random.Random(f"trace/{seed}")
    gaps = gaps_s(shape.rate, shape.gap_cv, rng)
    arrival_s = 0.0
    requests: list[TraceRequest] = []
    num_hashes = 0
    for _ in range(num_requests):
        num_prompt_tokens = _draw(shape.quantile_parts, shape.prompt_tokens, rng)
        num_blocks = num_prompt_tokens // BLOCK_TOKENS if shape.reuse else 0
        shared: tuple[int, ...] = ()
        if num_blocks and requests and rng.random() < shape.reuse:
            shared = rng.choice(requests).block_hashes[:num_blocks]
        fresh = range(num_hashes, num_hashes + num_blocks - len(shared))
        num_hashes += len(fresh)
        requests.append(
            TraceRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=_draw(shape.quantile_parts, shape.output_tokens, rng),
                block_hashes=(*shared, *fresh),
            )
        )
        arrival_s += next(gaps)
    return requests


def gaps_s(rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Draw gaps between arrivals: gamma distributed, mean 1 / rate, coefficient of variation `cv` (1: Poisson)."""
    shape = 1.0 / (cv * cv)
    while True:
        yield rng.gammavariate(shape, 1.0 / (rate * shape))


def _draw(parts: Sequence[float], values: Sequence[int], rng: random.Random) -> int:
    """Draw a length from a distribution given by its quantiles, with straight lines between them."""
    part = rng.random()
    index = next(index for index in range(1, len(parts)) if part <= parts[index])
    share = (part - parts[index - 1]) / (parts[index] - parts[index - 1])
    return max(1, round(values[index - 1] + share * (values[index] - values[index - 1])))


def _parse_azure(text: str) -> list[TraceRequest]:
    return [
        TraceRequest(
            # Seven digits of a second; Python takes six.
            arrival_s=datetime.datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp(),
            num_prompt_tokens=max(1, int(row["ContextTokens"])),
            num_output_tokens=max(1, int(row["GeneratedTokens"])),
        )
        for row in csv.DictReader(io.StringIO(text))
    ]


def _parse_mooncake(text: str) -> list[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    lines = (decoder.decode(line) for line in text.splitlines() if line.strip())
    return [
        TraceRequest(
            arrival_s=line.timestamp / 1e3,
            num_prompt_tokens=max(1, line.input_length),
            num_output_tokens=max(1, line.output_length),
            block_hashes=tuple(line.hash_ids[: line.input_length // BLOCK_TOKENS]),
        )
        for line in lines
    ]
