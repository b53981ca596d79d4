"""A rank's part of the model: first memory for it, then its weights.

Called by: Worker, when it starts and when it wakes up without weights.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from .attention.backend import AttentionBackend
from .config import ModelConfig
from .errors import DeviceMemoryError
from .models.causal_lm import CausalLM
from .models.registry import find_model
from .partition import Partition
from .tp_group import TensorParallelGroup
from .transformer_config import TransformerConfig
from .weights import load_weights

_SWITCH_INTERVAL_S = 5e-4
"""How long a thread may keep the interpreter from others while both work. At Python's 5 ms each of thousands of short
calls of the copying threads would wait for a compiler's."""


def build_model(
    transformer: TransformerConfig,
    partition: Partition,
    group: TensorParallelGroup,
    attention: AttentionBackend | None,
    *,
    dtype: torch.dtype,
    max_positions: int,
    device: torch.device,
) -> CausalLM:
    """Return the model on `device`; what stands in its weights is undefined. Raises DeviceMemoryError."""
    # Made where it stays: to be moved from the meta device, torch imports a computer algebra system first.
    try:
        with device:
            model = find_model(transformer.architecture)(
                transformer, partition, group, dtype, max_positions=max_positions
            )
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"the weights do not fit on {device}; raise parallel.tensor_parallel_size"
        ) from error
    model.place_tables(device)
    model.use_attention(attention)
    return model


def fill_model(model: CausalLM, config: ModelConfig, device: torch.device) -> tuple[int, float]:
    """Load the weights, on any thread. Returns their bytes, and how many seconds it took.

    Raises as `load_weights`.
    """
    started_at = time.monotonic()
    # What a thread computes on, and in which mode, is its own.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with torch.inference_mode():
        num_bytes = load_weights(model, config.path, config.load_format)
        num_bytes += model.pack_weights()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return num_bytes, time.monotonic() - started_at


def fill_model_beside(
    model: CausalLM, config: ModelConfig, device: torch.device, work: Callable[[], None]
) -> tuple[int, float]:
    """As `fill_model`, on a thread of its own, while `work`, which must not look at the weights, runs on this one.

    Both have ended when this returns or raises.
    """
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
            filling = pool.submit(fill_model, model, config, device)
            work()
            return filling.result()
    finally:
        sys.setswitchinterval(usual_s)
