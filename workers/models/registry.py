"""Which class computes which architecture. Called by: the Worker."""

from ..errors import UnsupportedModelError
from .llama import LlamaForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}


def find_model(architecture: str) -> type[LlamaForCausalLM]:
    """Return the class for config.json's architecture.

    Raises UnsupportedModelError, which lists those that there are.
    """
    model = MODELS.get(architecture)
    if model is None:
        raise UnsupportedModelError(
            f"the architecture {architecture} is not supported; supported: {', '.join(sorted(MODELS))}"
        )
    return model
