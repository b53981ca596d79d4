"""Streams that never end: each one that is read to its end is followed by the next, until told to stop.

Called by: failover.py and torture.py, on the event loop of the benchmark.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence

from .http_client import HttpClient
from .openai_client import Endpoint, OpenAIClient, RequestRecord, find_model

_PAUSE_AFTER_ERROR_S = 0.1
LOWEST_TOKEN_ID = 3
VOCAB_SIZE = 256
"""Of the token ids in prompts: every model has as many."""


class SteadyLoad:
    """Keeps `concurrency` streams under way.

    bodies: what is asked, in turns; a record's `index` says which one it was
    """

    def __init__(self, client: OpenAIClient, bodies: Sequence[bytes], *, concurrency: int) -> None:
        self.records: list[RequestRecord] = []
        """Of the streams that have ended, in the order of their ends."""
        self._client = client
        self._bodies = bodies
        self._turn = itertools.count()
        self._is_stopping = False
        self._tasks = [asyncio.create_task(self._follow_on()) for _ in range(concurrency)]

    async def stop(self) -> list[RequestRecord]:
        """Begin no more streams, wait for those under way, and return all records."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks)
        return self.records

    async def cancel(self) -> None:
        """Leave all streams where they are. After `stop`: nothing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow_on(self) -> None:
        while not self._is_stopping:
            index = next(self._turn) % len(self._bodies)
            record = await self._client.run(index, self._bodies[index], time.perf_counter())
            self.records.append(record)
            if record.error is not None:
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)


async def make_client(http: HttpClient, *, timeout_s: float) -> OpenAIClient:
    """Make a client of a cluster's completions endpoint that keeps the texts. Raises BenchError."""
    return OpenAIClient(
        http,
        endpoint=Endpoint.COMPLETIONS,
        model=await find_model(http),
        ignore_eos=True,
        temperature=0.0,
        timeout_s=timeout_s,
        keeps_text=True,
    )


def make_bodies(model: str, num_bodies: int, *, input_len: int, output_len: int, seed: int) -> list[bytes]:
    """Make what is asked: half of it greedy, half drawn from a seed; half of each with a stop string to look for."""
    rng = random.Random(f"steady load/{seed}")
    bodies = []
    for number in range(num_bodies):
        fields = {
            "model": model,
            "prompt": [rng.randrange(LOWEST_TOKEN_ID, VOCAB_SIZE) for _ in range(input_len)],
            "max_tokens": output_len,
            "temperature": 0.8 if number % 2 else 0.0,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if number // 2 % 2:
            fields["stop"] = ["no text has this"]
        bodies.append(json.dumps(fields).encode())
    return bodies
