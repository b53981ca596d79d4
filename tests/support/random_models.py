"""Small random models of every family, made and saved by transformers: its classes are the reference.

Called by: tests of the model side. The weights are wide enough that the logits of different tokens stand apart.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What all of them have, if a test does not say otherwise."""


def write_random_model(folder: Path, model_type: str, *, seed: int = 0, **fields: Any) -> Path:
    """Save a random model of `model_type` ("qwen2") into `folder`, and return it. fields: of its config."""
    config = AutoConfig.for_model(model_type, **{**SHAPE, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.3)
            else:
                # Norms: Gemma's scale by one plus the weight.
                parameter.copy_(noise * 0.3 + (not model_type.startswith("gemma")))
    model.save_pretrained(folder)
    return folder


def reference_model(folder: Path) -> PreTrainedModel:
    """What transformers loads from `folder`, in fp32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def reference_tokens(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by transformers, without a cache and whatever the end tokens."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def edit_config(folder: Path, drop: tuple[str, ...] = (), **fields: Any) -> None:
    """Change config.json: set `fields`, leave out `drop`."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **fields}
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}), encoding="utf-8")
