"""The workloads of the offline benchmarks, by name: prompts as token ids, and how many tokens each is to get. Pure.

Called by: latency.py and throughput.py. A name is one of `NAMED`, or a shape: "64x512-256" is 64 prompts of 512
tokens that get 256 each, drawn at temperature 0.6; "64x512-256:greedy" takes the likeliest, "64x512-256:filtered" draws
from the likeliest 50, and of those from the first that make up 0.9.
Invariant: the same name gives the same prompts on every machine, but for ids that a small vocabulary lacks.
"""

import random
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

TEMPERATURE = 0.6
HIGHEST_TOKEN_ID = 9999
NANO_REQUESTS, NANO_LENGTHS = 256, (100, 1024)

NAMED: Mapping[str, str] = MappingProxyType(
    {
        "single": "1x128-256",
        "batch64": "64x512-256:greedy",
        "batch256": "256x1024-256",
        "nano": "256 of 100 to 1024 tokens each way, as nano-vllm's benchmark has them",
    }
)
"""What each name stands for."""
TOP_K, TOP_P = 50, 0.9
_SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)-([1-9]\d*)(?::(greedy|filtered))?")


class OfflineWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are all given at once. prompts and output_lens are parallel; temperature 0 is greedy.

    top_k, top_p: 0 and 1: off
    """

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]

    @property
    def num_output_tokens(self) -> int:
        """Tokens made in all."""
        return sum(self.output_lens)

    @property
    def max_len(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(map(sum, zip(self.prompt_lens, self.output_lens, strict=True)))


def make_workload(name: str, *, vocab_size: int) -> OfflineWorkload:
    """Make a workload by its name or shape; ids are below `vocab_size`. Raises ValueError when it is neither."""
    rng = random.Random(0)
    highest = min(HIGHEST_TOKEN_ID, vocab_size - 1)
    if name == "nano":
        prompts, output_lens = [], []
        for _ in range(NANO_REQUESTS):
            prompts.append([rng.randint(0, highest) for _ in range(rng.randint(*NANO_LENGTHS))])
            output_lens.append(rng.randint(*NANO_LENGTHS))
        return OfflineWorkload(name=name, prompts=prompts, output_lens=output_lens, temperature=TEMPERATURE)
    shape = _SHAPE.fullmatch(NAMED.get(name, name))
    if shape is None:
        raise ValueError(
            f"{name!r} is neither one of {', '.join(NAMED)} nor a shape like 64x512-256, 64x512-256:greedy or "
            "64x512-256:filtered"
        )
    filters: dict[str, Any] = {"top_k": TOP_K, "top_p": TOP_P} if shape.group(4) == "filtered" else {}
    num_requests, prompt_len, output_len = (int(number) for number in shape.groups()[:3])
    return OfflineWorkload(
        name=name,
        prompts=[[rng.randint(0, highest) for _ in range(prompt_len)] for _ in range(num_requests)],
        output_lens=[output_len] * num_requests,
        temperature=0.0 if shape.group(4) == "greedy" else TEMPERATURE,
        **filters,
    )


def shorten(workload: OfflineWorkload, output_len: int) -> OfflineWorkload:
    """The same prompts with `output_len` tokens each at most: for a trace, which holds every kernel."""
    shorter = [min(output_len, length) for length in workload.output_lens]
    return msgspec.structs.replace(workload, output_lens=shorter)
