"""Train the model of tests/fixtures/tiny-llama: two layers that know the text of LICENSE by heart.

Run by hand, in tests/: `python -m support.train_tiny_llama [FOLDER]`, about two minutes on two cores. It learns to go
on from any place in the text, and, as a chat, to answer a quotation with the rest of its paragraph.
"""

import math
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from support.tiny_models import (
    END_OF_TURN_ID,
    LICENSE_PATH,
    TRAINED,
    llama_config,
    train_tokenizer,
    write_config,
    write_tokenizer,
)

VOCAB_SIZE = 512
SEQUENCE_LEN = 384
BATCH_SIZE = 8
NUM_CHATS = 2
NUM_STEPS = 700
PEAK_RATE = 4e-3
IGNORED = -100


def text_rows(tokens: list[int], rng: random.Random, count: int) -> list[list[int]]:
    """Windows of the text, ended by the end token; short ones included."""
    rows = []
    for _ in range(count):
        start = rng.randrange(-SEQUENCE_LEN // 2, len(tokens) - 16)
        rows.append(tokens[max(0, start) : max(0, start) + SEQUENCE_LEN + 1])
    return rows


def chat_row(text: str, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """A quotation from the text, answered with what follows it up to the end of the paragraph."""
    paragraphs = [paragraph for paragraph in text.split("\n\n") if len(paragraph) > 120]
    words = rng.choice(paragraphs).split(" ")
    start = rng.randrange(max(1, len(words) - 16))
    cut = start + rng.randrange(8, 16)
    quoted, rest = " ".join(words[start:cut]).strip(), " ".join(words[cut:]).strip()
    chat = f"<|im_start|>user\n{quoted}<|im_end|>\n<|im_start|>assistant\n{rest}<|im_end|>\n"
    return tokenizer.encode(chat).ids[: SEQUENCE_LEN + 1]


def main(folder: Path) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    rng = random.Random(0)
    text = LICENSE_PATH.read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text, VOCAB_SIZE)
    tokens = [*tokenizer.encode(text).ids, END_OF_TURN_ID]
    config = llama_config(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=256,
        num_heads=6,
        num_kv_heads=3,
        head_dim=16,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(LlamaConfig(**{**config, "initializer_range": 0.05}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    print(f"{len(tokens)} tokens, {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    for step in range(NUM_STEPS):
        rate = (
            PEAK_RATE * min(1.0, (step + 1) / 40) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / NUM_STEPS)))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = text_rows(tokens, rng, BATCH_SIZE - NUM_CHATS)
        rows += [chat_row(text, tokenizer, rng) for _ in range(NUM_CHATS)]
        inputs = torch.zeros(BATCH_SIZE, SEQUENCE_LEN, dtype=torch.int64)
        targets = torch.full((BATCH_SIZE, SEQUENCE_LEN), IGNORED)
        for index, row in enumerate(rows):
            inputs[index, : len(row) - 1] = torch.tensor(row[:-1])
            targets[index, : len(row) - 1] = torch.tensor(row[1:])
        logits = model(inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    write_config(folder, config)
    write_tokenizer(folder, tokenizer, config["max_position_embeddings"])
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in model.state_dict().items()}
    tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TRAINED)
