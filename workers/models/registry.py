"""Which class computes which architecture, by name: the list is known without torch.

Called by: transformer_config.py, which refuses what is not here before anything starts; the Worker, for the class.
"""

import importlib
from typing import TYPE_CHECKING

from ...shm.errors import ConfigError

if TYPE_CHECKING:
    from .causal_lm import CausalLM

MODELS: dict[str, str] = {
    "Gemma3ForCausalLM": "gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "gemma3:Gemma3ForCausalLM",
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "MistralForCausalLM": "mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
}
"""config.json's architecture: module in this folder, class in it."""


def check_architecture(architecture: str) -> None:
    """Raise ConfigError (field "model"), which lists those that there are, for an architecture that is not."""
    if architecture not in MODELS:
        raise ConfigError(
            "model",
            f"the architecture {architecture} is not supported; supported: {', '.join(sorted(MODELS))}",
        )


def find_model(architecture: str) -> "type[CausalLM]":
    """Import the class for config.json's architecture. Raises ConfigError as `check_architecture`."""
    check_architecture(architecture)
    module, name = MODELS[architecture].split(":")
    found: type[CausalLM] = getattr(importlib.import_module(f".{module}", __package__), name)
    return found
