"""Clients of a cluster: the openai package, alone or many at once."""

import asyncio
from collections.abc import Sequence

from openai import AsyncOpenAI

from support.launch import Cluster


async def complete(client: AsyncOpenAI, prompt: str, *, max_tokens: int, stream: bool) -> str:
    """Ask for one greedy completion of the only model there is."""
    model = (await client.models.list()).data[0].id
    if not stream:
        completion = await client.completions.create(
            model=model, prompt=prompt, max_tokens=max_tokens, temperature=0
        )
        return completion.choices[0].text
    chunks = await client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in chunks])


def ask(
    cluster: Cluster, prompts: Sequence[str], *, max_tokens: int, stream: bool = False, at_once: bool = True
) -> list[str]:
    """Ask for all completions, at once or one after the other; return their texts in order."""

    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            if at_once:
                answers = (
                    complete(client, prompt, max_tokens=max_tokens, stream=stream) for prompt in prompts
                )
                return await asyncio.gather(*answers)
            return [
                await complete(client, prompt, max_tokens=max_tokens, stream=stream) for prompt in prompts
            ]

    return asyncio.run(run())
