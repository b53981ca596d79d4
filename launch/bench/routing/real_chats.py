"""The chats of a routing load, played through a real cluster over HTTP, and what its metrics say of them.

Called by: real.py, on the event loop of the benchmark. Prompts are token ids that stand for the load's blocks: equal
keys are equal tokens, so that replicas find in their caches what the simulated ones find. What a chat was answered is
part of its next prompt, so each answer is told in advance: one token, as many times as the request wants, and the
model may choose no other (`allowed_token_ids`).

A request that fails ends the benchmark: BenchError.
"""

import asyncio
import random
import time
from collections.abc import Mapping

import msgspec

from ....cluster.step_cost import StepWork
from ..errors import BenchError
from ..http_client import HttpClient
from ..openai_client import OpenAIClient
from ..replica_watch import parse_series
from ..steady_load import LOWEST_TOKEN_ID, VOCAB_SIZE
from .load import Load, SimRequest, turns

SETTLE_TIMEOUT_S = 30.0
"""Replicas report what they did when they come to rest, a moment after the last answer."""
_ASK_EVERY_S = 0.1
_SERIES = {
    "queried_tokens": "phalanx_prefix_cache_queried_tokens_total",
    "hit_tokens": "phalanx_prefix_cache_hit_tokens_total",
    "prefill_tokens": "phalanx_engine_prefill_tokens_total",
    "output_tokens": "phalanx_engine_output_tokens_total",
    "context_tokens": "phalanx_engine_context_tokens_total",
    "num_steps": "phalanx_engine_steps_total",
    "busy_s": "phalanx_engine_busy_seconds_total",
    "num_blocks": "phalanx_kv_blocks_total",
}


class ReplicaCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What the metrics say of one replica. All but num_blocks are counters.

    context_tokens: in the KV cache for the requests of a step, summed over the steps; busy_s: with a step in flight
    """

    queried_tokens: int
    hit_tokens: int
    prefill_tokens: int
    output_tokens: int
    context_tokens: int
    num_steps: int
    busy_s: float
    num_blocks: int

    @property
    def work(self) -> StepWork:
        """What was computed, and how long it took."""
        return StepWork(
            busy_s=self.busy_s,
            num_steps=self.num_steps,
            num_prefill_tokens=self.prefill_tokens,
            num_output_tokens=self.output_tokens,
            num_context_tokens=self.context_tokens,
        )

    def since(self, before: "ReplicaCounts") -> "ReplicaCounts":
        """What was counted after `before`."""
        return ReplicaCounts(
            queried_tokens=self.queried_tokens - before.queried_tokens,
            hit_tokens=self.hit_tokens - before.hit_tokens,
            prefill_tokens=self.prefill_tokens - before.prefill_tokens,
            output_tokens=self.output_tokens - before.output_tokens,
            context_tokens=self.context_tokens - before.context_tokens,
            num_steps=self.num_steps - before.num_steps,
            busy_s=self.busy_s - before.busy_s,
            num_blocks=self.num_blocks,
        )


class SpelledPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request's prompt, and the token that its answer consists of."""

    token_ids: list[int]
    answer_token_id: int


def spell(load: Load, seed: int) -> dict[str, SpelledPrompt]:
    """Give each request of a load its tokens, by request id. Pure; other seeds share no block."""
    rng = random.Random(f"{load.name}/{seed}/tokens")
    blocks: dict[bytes, list[int]] = {}

    def draw() -> int:
        return rng.randrange(LOWEST_TOKEN_ID, VOCAB_SIZE)

    prompts = {}
    for _, first in load.arrivals:
        for request in turns(first):
            prompt_keys = request.keys[: request.num_prompt_blocks]
            for key in prompt_keys:
                if key not in blocks:
                    blocks[key] = [draw() for _ in range(load.block_tokens)]
            answer = draw()
            for key in request.keys[request.num_prompt_blocks :]:
                blocks[key] = [answer] * load.block_tokens
            token_ids = [token for key in prompt_keys for token in blocks[key]]
            # What is beyond the last full block goes on as the answer does, which completes the block.
            token_ids += [answer] * (request.num_prompt_tokens - len(token_ids))
            prompts[request.request_id] = SpelledPrompt(token_ids=token_ids, answer_token_id=answer)
    return prompts


async def play(load: Load, prompts: Mapping[str, SpelledPrompt], client: OpenAIClient) -> None:
    """Send all requests when they are due, each turn of a chat after the one before it. Raises BenchError."""
    began_at = time.perf_counter()

    async def chat(due_s: float, first: SimRequest) -> None:
        await asyncio.sleep(began_at + due_s - time.perf_counter())
        for request in turns(first):
            prompt = prompts[request.request_id]
            body = msgspec.json.encode(
                {
                    "model": client.model,
                    "prompt": prompt.token_ids,
                    "max_tokens": request.num_output_tokens,
                    "allowed_token_ids": [prompt.answer_token_id],
                    "ignore_eos": True,
                    "temperature": 0.0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            )
            record = await client.run(0, body, time.perf_counter())
            if record.error is not None:
                raise BenchError(f"{request.request_id}: {record.error} {record.error_detail}")
            counted = (record.num_prompt_tokens, record.num_output_tokens)
            if counted != (request.num_prompt_tokens, request.num_output_tokens):
                raise BenchError(f"{request.request_id}: the server counts {counted} tokens")
            if request.follow_up is not None:
                await asyncio.sleep(request.think_s)

    try:
        async with asyncio.TaskGroup() as group:
            for due_s, first in load.arrivals:
                group.create_task(chat(due_s, first))
    except ExceptionGroup as group:
        for error in group.exceptions:
            if isinstance(error, BenchError):
                raise error from None
        raise


async def read_counts(http: HttpClient) -> dict[int, ReplicaCounts]:
    """Ask /metrics what each replica has counted, by dp_rank. Raises BenchError, OSError."""
    response = await http.send("GET", "/metrics")
    try:
        text = (await response.read()).decode()
    finally:
        response.close()
    if response.status != 200:
        raise BenchError(f"the server answers /metrics with status {response.status}")
    return parse_counts(text)


def parse_counts(text: str) -> dict[int, ReplicaCounts]:
    """Read the replicas' counts out of Prometheus's text. Pure. Raises BenchError when a series is missing."""
    return parse_series(text, _SERIES, ReplicaCounts)


async def wait_replicas(http: HttpClient, num_replicas: int) -> dict[int, ReplicaCounts]:
    """Wait until all replicas have reported; return what they have counted so far. Raises BenchError."""
    deadline = time.perf_counter() + SETTLE_TIMEOUT_S
    while True:
        counts = await read_counts(http)
        if set(counts) == set(range(num_replicas)):
            return counts
        if time.perf_counter() > deadline:
            raise BenchError(f"the metrics name replicas {sorted(counts)}, not {num_replicas}")
        await asyncio.sleep(_ASK_EVERY_S)


async def wait_counts(
    http: HttpClient, before: Mapping[int, ReplicaCounts], num_output_tokens: int
) -> dict[int, ReplicaCounts]:
    """Wait until the replicas have reported all output tokens since `before`; return what they counted since.

    Raises BenchError when they have counted more, or do not come to it.
    """
    deadline = time.perf_counter() + SETTLE_TIMEOUT_S
    while True:
        counts = {rank: after.since(before[rank]) for rank, after in (await read_counts(http)).items()}
        counted = sum(one.output_tokens for one in counts.values())
        if counted == num_output_tokens:
            return counts
        if counted > num_output_tokens or time.perf_counter() > deadline:
            raise BenchError(f"the replicas made {counted} output tokens of {num_output_tokens}")
        await asyncio.sleep(_ASK_EVERY_S)
