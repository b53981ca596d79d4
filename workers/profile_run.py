"""The largest step that the scheduler may ask for, run once at the start to see what memory it takes.

Called by: Worker.start(), on a GPU. Uses a small KV cache of its own, which is gone afterwards.
"""

import numpy as np
import torch

from .forward_context import StepRows, build_forward_context
from .memory import KVCacheShape, make_kv_caches
from .models.causal_lm import CausalLM
from .sampler import SamplingBatch, sample


def profile_peak_bytes(
    model: CausalLM,
    shape: KVCacheShape,
    *,
    device: torch.device,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> int:
    """Return the most bytes that torch held during a full step, weights included, its KV cache left out.

    Raises torch.OutOfMemoryError when even that does not fit.
    """
    num_full, rest = divmod(max_num_batched_tokens, max_model_len)
    query_lens = np.array([max_model_len] * num_full + [rest] * (rest > 0), dtype=np.int64)
    blocks_per_row = -(-int(query_lens.max()) // shape.block_size)
    num_blocks = 1 + blocks_per_row * len(query_lens)
    kv_caches = make_kv_caches(shape, num_blocks, device)
    kv_bytes = num_blocks * shape.bytes_per_block
    rows = StepRows(
        query_lens=query_lens,
        kv_lens=query_lens,
        block_tables=np.arange(1, num_blocks, dtype=np.int64).reshape(len(query_lens), blocks_per_row),
        block_size=shape.block_size,
    )
    torch.cuda.reset_peak_memory_stats(device)
    context = build_forward_context(rows, windows=model.windows, dtype=shape.dtype, device=device)
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in query_lens])).to(device)
    hidden = model(torch.zeros_like(positions), positions, kv_caches, context)
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    sample(model.compute_logits(hidden[:num_rows].contiguous()), _random_batch(num_rows, device))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - kv_bytes
    del kv_caches, hidden, context
    torch.cuda.empty_cache()
    return peak


def _random_batch(num_rows: int, device: torch.device) -> SamplingBatch:
    """Rows with every filter on: the most that sampling takes."""
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return SamplingBatch(
        temperatures=torch.ones(num_rows, device=device),
        top_ks=zeros,
        top_ps=torch.full((num_rows,), 0.9, device=device),
        seeds=zeros,
        positions=zeros,
        banned_row_index=None,
        banned_token_ids=None,
        all_greedy=False,
        any_filtered=True,
    )
