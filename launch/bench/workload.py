"""The stream of requests that `cluster-bench serve` sends: lengths, arrivals and prompts, all from one seed. Pure.

Called by: serve.py, before anything is sent, so that making prompts takes no time from the measurement.
Invariant: the same options, seed and tokenizer give the same stream, byte for byte.
"""

import itertools
import random
from collections.abc import Callable, Sequence

import msgspec

from ...engine.tokenizer import Tokenizer
from .errors import BenchError
from .traces import BLOCK_TOKENS, TraceRequest, gaps_s

_MAX_FITTING_ROUNDS = 8
_LOWEST_TOKEN_ID = 3
"""Ids below are special in most vocabularies."""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One request to send.

    arrival_s: since the run began, for an open loop
    prompt:    token ids, or text
    """

    index: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prompt: list[int] | str


def random_trace(
    num_requests: int,
    *,
    num_prompt_tokens: int,
    num_output_tokens: int,
    range_ratio: float,
    num_shared_tokens: int,
    seed: int,
) -> list[TraceRequest]:
    """Make requests of random lengths, all arriving at once.

    range_ratio:       lengths are uniform in [1 - ratio, 1 + ratio] times the given ones
    num_shared_tokens: with which all prompts begin, in whole blocks of BLOCK_TOKENS; part of num_prompt_tokens
    """
    rng = random.Random(f"lengths/{seed}")

    def draw(length: int) -> int:
        return max(1, round(length * rng.uniform(1 - range_ratio, 1 + range_ratio)))

    requests = []
    for _ in range(num_requests):
        num_tokens = draw(num_prompt_tokens)
        shared = min(num_shared_tokens, num_tokens) // BLOCK_TOKENS
        requests.append(
            TraceRequest(
                arrival_s=0.0,
                num_prompt_tokens=num_tokens,
                num_output_tokens=draw(num_output_tokens),
                block_hashes=tuple(range(shared)),
            )
        )
    return requests


def fit_trace(
    trace: Sequence[TraceRequest], num_requests: int | None, *, max_model_len: int | None
) -> list[TraceRequest]:
    """Cut a trace to what shall and can be sent: the first `num_requests`, those too long left out."""
    fitting = (
        request
        for request in trace
        if max_model_len is None or request.num_prompt_tokens + request.num_output_tokens <= max_model_len
    )
    cut = list(itertools.islice(fitting, num_requests))
    if not cut:
        raise BenchError("no request of the trace fits --max-model-len")
    return cut


def with_arrivals(trace: Sequence[TraceRequest], rate: float, *, cv: float, seed: int) -> list[TraceRequest]:
    """Let the requests of a trace arrive at `rate` a second, in their order; see `traces.gaps_s` for `cv`."""
    gaps = gaps_s(rate, cv, random.Random(f"arrivals/{seed}"))
    arrivals = itertools.accumulate(itertools.islice(gaps, len(trace) - 1), initial=0.0)
    return [
        msgspec.structs.replace(request, arrival_s=arrival_s)
        for request, arrival_s in zip(trace, arrivals, strict=True)
    ]


def scaled(trace: Sequence[TraceRequest], speed: float) -> list[TraceRequest]:
    """Let a trace run `speed` times as fast."""
    return [msgspec.structs.replace(request, arrival_s=request.arrival_s / speed) for request in trace]


def make_requests(
    trace: Sequence[TraceRequest], *, vocab_size: int, seed: int, tokenizer: Tokenizer | None
) -> list[RequestSpec]:
    """Give every request its prompt: random token ids, or with a tokenizer a text of about as many tokens."""
    blocks: dict[int, list[int]] = {}

    def block(block_hash: int) -> list[int]:
        if block_hash not in blocks:
            blocks[block_hash] = _random_ids(BLOCK_TOKENS, vocab_size, f"block/{seed}/{block_hash}")
        return blocks[block_hash]

    requests = []
    for index, request in enumerate(trace):
        token_ids = [token_id for block_hash in request.block_hashes for token_id in block(block_hash)]
        num_own = max(0, request.num_prompt_tokens - len(token_ids))
        token_ids += _random_ids(num_own, vocab_size, f"own/{seed}/{index}")
        del token_ids[request.num_prompt_tokens :]
        prompt = token_ids if tokenizer is None else fit_text(token_ids, tokenizer.encode, tokenizer.decode)
        requests.append(
            RequestSpec(
                index=index,
                arrival_s=request.arrival_s,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                prompt=prompt,
            )
        )
    return requests


def fit_text(
    token_ids: Sequence[int], encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str]
) -> str:
    """Return a text that encodes to about as many tokens as `token_ids`, and begins as they do.

    Text of random tokens encodes to others, often more or fewer. The end is cut or repeated until the number is
    right, or a few rounds have not made it so: what was really sent is what the server counts.
    """
    wanted = len(token_ids)
    text = decode(token_ids)
    for _ in range(_MAX_FITTING_ROUNDS):
        encoded = encode(text)
        if len(encoded) == wanted:
            break
        if len(encoded) < wanted:
            encoded = [*encoded, *itertools.islice(itertools.cycle(token_ids), wanted - len(encoded))]
        text = decode(encoded[:wanted])
    return text


def _random_ids(count: int, vocab_size: int, seed: str) -> list[int]:
    return random.Random(seed).choices(range(_LOWEST_TOKEN_ID, vocab_size), k=count)
