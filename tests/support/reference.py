"""What `transformers` says, for comparison: greedy continuations in fp32."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SHORT = 64
"""Tokens of a prompt that is worth filling up."""


def greedy_tokens(
    model_folder: Path, prompts: Iterable[list[int]], max_tokens: int, device: str = "cpu"
) -> list[list[int]]:
    """Continue each prompt by at most `max_tokens` tokens, the end-of-sequence token included when it comes."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.eval().to(device)
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    all_prompts = list(prompts)
    continued: list[list[int]] = [[] for _ in all_prompts]
    with torch.inference_mode():
        for batch in _batches(all_prompts):
            longest = max(len(all_prompts[index]) for index in batch)
            padded = torch.zeros(len(batch), longest, dtype=torch.long, device=device)
            mask = torch.zeros_like(padded)
            for row, index in enumerate(batch):
                length = len(all_prompts[index])
                padded[row, longest - length :] = torch.tensor(all_prompts[index], device=device)
                mask[row, longest - length :] = 1
            output = model.generate(
                padded, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
            )
            for row, index in enumerate(batch):
                tokens = output[row, longest:].tolist()
                # After its end, a row is filled up while others go on.
                end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
                continued[index] = tokens[: end + 1]
    return continued


def _batches(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Short prompts together, filled up on the left: a step costs as much for one as for all. Longer ones alone."""
    short = [index for index, prompt in enumerate(prompts) if len(prompt) <= SHORT]
    alone = [[index] for index, prompt in enumerate(prompts) if len(prompt) > SHORT]
    return [short, *alone] if short else alone


def greedy_texts(
    model_folder: Path, prompts: Iterable[str], max_tokens: int, device: str = "cpu"
) -> list[str]:
    """The same for texts: prompts are tokenised, continuations decoded, special tokens left out."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokens = greedy_tokens(
        model_folder, [tokenizer(prompt)["input_ids"] for prompt in prompts], max_tokens, device
    )
    return [
        tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in tokens
    ]
