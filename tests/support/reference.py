"""What `transformers` says, for comparison: greedy continuations in fp32."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def greedy_tokens(
    model_folder: Path, prompts: Iterable[list[int]], max_tokens: int, device: str = "cpu"
) -> list[list[int]]:
    """Continue each prompt by at most `max_tokens` tokens, the end-of-sequence token included when it comes."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.eval().to(device)
    continued = []
    with torch.inference_mode():
        for prompt in prompts:
            output = model.generate(
                torch.tensor([prompt], device=device),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
                do_sample=False,
                max_new_tokens=max_tokens,
            )
            continued.append(output[0, len(prompt) :].tolist())
    return continued


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
