"""Keyword arguments of `LLM` and `AsyncLLM.launch` to an `EngineConfig`.

Called by: llm.py and async_llm.py, in the user's process. Every field of every section can be given by its own
name; no two sections have a field of one name (a test keeps it so).
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from ..shm.errors import ConfigError
from ..workers.config import CacheConfig, ExecutorConfig, ModelConfig, ParallelConfig
from ..workers.gpu_count import count_gpus
from .config import EngineConfig, SchedulerConfig
from .device_defaults import device_defaults
from .model_folder import find_model_folder

SECTIONS = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "parallel": ParallelConfig,
    "executor": ExecutorConfig,
    "scheduler": SchedulerConfig,
}


def make_engine_config(model: str | Path, **overrides: Any) -> EngineConfig:
    """Build the configuration of one replica.

    model:     a folder, a GGUF file, or a name on the Hugging Face hub
    overrides: fields of the sections by their own names (tensor_parallel_size=2, num_blocks=100)
    Raises ConfigError that names the field; an unknown one lists those that are known.
    """
    homes = {field.name: section for section, kind in SECTIONS.items() for field in fields(kind)}
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    values["model"]["path"] = str(find_model_folder(str(model)))
    for name, value in overrides.items():
        if name not in homes or name == "path":
            known = ", ".join(sorted(homes.keys() - {"path"}))
            raise ConfigError(name, f"is not a setting; known are {known}")
        values[homes[name]][name] = value
    device = _convert("parallel", values["parallel"]).device
    for dotted, default in device_defaults(device, num_gpus=count_gpus()).items():
        section, _, name = dotted.partition(".")
        values[section].setdefault(name, default)
    sections = {section: _convert(section, values[section]) for section in SECTIONS}
    return EngineConfig(**sections)


def _convert(section: str, values: dict[str, Any]) -> Any:
    try:
        return msgspec.convert(values, SECTIONS[section])
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise ConfigError(f"{section}.{name}" if name else section, problem) from None
