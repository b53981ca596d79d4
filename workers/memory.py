"""How many KV blocks one rank can hold, and the cache itself.

Called by: Worker, at the start. The executor takes the minimum over the ranks.
"""

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch

from .config import CacheConfig
from .errors import DeviceMemoryError
from .kv_cache_groups import KVCacheGroup, make_kv_cache_groups
from .layers.attention import LayerKVCache
from .memory_wait import wait_for_memory
from .transformer_config import TransformerConfig

log = logging.getLogger(__name__)

MIN_BLOCKS = 2
"""The null block, and one to use."""
MEMORY_WAIT_S = 60.0
"""For the memory of the process that was here before. Then the rank starts with what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """The cache of one rank, but for the number of blocks."""

    groups: tuple[KVCacheGroup, ...]
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that a query of each group sees at most; None: all."""
        return tuple(group.window for group in self.groups)

    @property
    def num_layers_per_block(self) -> int:
        """Layers of the largest group, which every block has room for."""
        return max(len(group.layers) for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of one block in the layers of one group."""
        per_token = 2 * self.num_layers_per_block * self.num_kv_heads * self.head_size * self.dtype.itemsize
        return per_token * self.block_size


def kv_cache_shape(
    config: TransformerConfig,
    cache: CacheConfig,
    *,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> KVCacheShape:
    """num_kv_heads: those of this rank."""
    return KVCacheShape(
        groups=make_kv_cache_groups(config),
        block_size=cache.block_size,
        num_kv_heads=num_kv_heads,
        head_size=config.head_dim,
        dtype=dtype,
    )


def make_kv_caches(shape: KVCacheShape, num_blocks: int, device: torch.device) -> list[LayerKVCache]:
    """Allocate the cache, zeroed: one for each layer of the model, in its order. Raises DeviceMemoryError."""
    try:
        stores = [
            (_zeros(shape, num_blocks, device), _zeros(shape, num_blocks, device))
            for _ in range(shape.num_layers_per_block)
        ]
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceMemoryError(
            f"{num_blocks} KV blocks of {shape.bytes_per_block} bytes do not fit on {device}; "
            "lower cache.num_blocks or cache.memory_utilization"
        ) from error
    caches: dict[int, LayerKVCache] = {}
    for number, group in enumerate(shape.groups):
        for layer, (k, v) in zip(group.layers, stores, strict=False):
            caches[layer] = LayerKVCache(k=k, v=v, group=number)
    return [caches[layer] for layer in sorted(caches)]


def _zeros(shape: KVCacheShape, num_blocks: int, device: torch.device) -> torch.Tensor:
    size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size)
    if device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=device)
    # numpy takes its zeros from the kernel, page by page when they are first used; torch would write each now,
    # and four ranks of a small machine would spend seconds on memory that most of them never need.
    num_bytes = math.prod(size) * shape.dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(shape.dtype).view(size)


def count_kv_blocks(
    cache: CacheConfig, shape: KVCacheShape, *, room_bytes: int, max_num_seqs: int, max_model_len: int
) -> int:
    """Blocks of this rank, the null block included.

    room_bytes: what is left for the cache. Ignored when cache.num_blocks is set.
    Raises DeviceMemoryError when the room is too small for any request, and says what to change.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    num_blocks = room_bytes // shape.bytes_per_block
    if num_blocks < MIN_BLOCKS:
        raise DeviceMemoryError(
            f"{max(0, room_bytes)} bytes are left for the KV cache, and one block takes {shape.bytes_per_block}; raise "
            "cache.memory_utilization (on CPU cache.cpu_kv_bytes) or parallel.tensor_parallel_size, "
            "or lower scheduler.max_num_batched_tokens"
        )
    # More than all rows at full length can never be used.
    num_blocks_per_seq = -(-max_model_len // cache.block_size) * len(shape.groups)
    return min(num_blocks, max_num_seqs * num_blocks_per_seq + 1)


def cuda_room(
    device: torch.device, *, memory_utilization: float, profile_peak_bytes: int, shares_device: bool
) -> int:
    """Bytes left for the KV cache on a GPU.

    profile_peak_bytes: the most that torch had allocated during the profile run, without its scratch cache
    shares_device:      other ranks use the same GPU, each within its own memory_utilization
    """
    free, total = torch.cuda.mem_get_info(device)
    if shares_device:
        # What others hold is not charged to this rank, and changes while it looks.
        room = min(int(memory_utilization * total), free + torch.cuda.memory_reserved(device))
        return room - profile_peak_bytes
    # What the driver counts as used beyond torch's own pool: contexts, NCCL, and other processes.
    outside = total - free - torch.cuda.memory_reserved(device)
    return int(memory_utilization * total) - profile_peak_bytes - outside


def wait_for_earlier_life(device: torch.device, expected_free_bytes: int | None) -> int | None:
    """On a GPU: wait for what an earlier life of this rank held, if that was told. Returns the bytes that are free."""
    if device.type != "cuda":
        return None

    def read_free_bytes() -> int:
        return int(torch.cuda.mem_get_info(device)[0])

    if expected_free_bytes is not None and not wait_for_memory(
        read_free_bytes, expected_free_bytes, timeout_s=MEMORY_WAIT_S
    ):
        log.warning(
            "memory of an earlier process is not free free_bytes=%d expected_bytes=%d",
            read_free_bytes(),
            expected_free_bytes,
        )
    return read_free_bytes()
