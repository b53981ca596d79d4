"""Phalanx: serves large language models on many GPUs, and goes on when a process dies.

The public names are loaded on first use, so that a process which needs only `phalanx.shm` does not
import the engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.async_llm import AsyncLLM
    from .engine.llm import LLM
    from .engine.outputs import CompletionOutput, RequestOutput
    from .workers.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": ".engine.llm",
    "AsyncLLM": ".engine.async_llm",
    "CompletionOutput": ".engine.outputs",
    "RequestOutput": ".engine.outputs",
    "SamplingParams": ".workers.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
