"""Which device and which numbers one rank computes with, and how many threads.

Called by: Worker.start(), in the worker process. The settings of torch that belong to the whole process are made
here and nowhere else.
"""

import os
from dataclasses import dataclass

import torch

from ..shm.errors import ConfigError
from .config import DeviceType, DType, ModelConfig, ParallelConfig
from .host_allocator import keep_large_buffers
from .transformer_config import TransformerConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """The device of one rank. name: as the driver calls it; num_threads: compute threads on CPU."""

    device: torch.device
    name: str
    num_threads: int


def open_device(parallel: ParallelConfig, device_index: int) -> DeviceInfo:
    """Make the rank's device current and set the number of compute threads.

    Raises ConfigError (parallel.device) when CUDA is wanted and there is no such device.
    """
    is_cuda = parallel.device is DeviceType.CUDA or (
        parallel.device is DeviceType.AUTO and torch.cuda.is_available()
    )
    if not is_cuda:
        # Ranks that share the host are told how many (worker_group.py); one in the user's process takes all cores.
        num_threads = parallel.num_threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(num_threads)
        keep_large_buffers()
        return DeviceInfo(
            device=torch.device("cpu"), name=torch.backends.cpu.get_cpu_capability(), num_threads=num_threads
        )
    index = 0 if parallel.share_device else device_index
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise ConfigError("parallel.device", f"there is no CUDA device {index} on this host")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    # TF32 keeps 10 bits of the mantissa: a float32 model would no longer give float32 results.
    torch.set_float32_matmul_precision("highest")
    num_threads = parallel.num_threads or 1
    torch.set_num_threads(num_threads)
    return DeviceInfo(device=device, name=torch.cuda.get_device_name(device), num_threads=num_threads)


def resolve_dtype(model: ModelConfig, config: TransformerConfig, device: torch.device) -> torch.dtype:
    """Type of weights, activations and KV cache.

    Raises ConfigError (model.dtype) when the checkpoint's own type is wanted and is not one we compute with.
    """
    name = model.dtype.value
    if model.dtype is DType.AUTO:
        name = config.dtype if device.type == "cuda" else "float32"
    if name not in _DTYPES:
        raise ConfigError("model.dtype", f"the checkpoint's type {name} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def resolve_max_model_len(model: ModelConfig, transformer: TransformerConfig) -> int:
    """Longest request in tokens: the setting, or what the model was trained for, whichever is less."""
    if model.max_model_len is None:
        return transformer.max_position_embeddings
    return min(model.max_model_len, transformer.max_position_embeddings)
