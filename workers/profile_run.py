"""The largest step that the scheduler may ask for, run once at the start to see what memory it takes.

Called by: Worker.start(), on a GPU. Uses a small KV cache of its own, which is gone afterwards.
"""

from collections.abc import Sequence

import numpy as np
import torch

from .forward_context import ForwardContext, StepRows, build_forward_context, slot_mapping
from .memory import KVCacheShape, make_kv_caches
from .messages import NewRequest
from .models.causal_lm import CausalLM
from .paged_rows import PagedRows
from .sampler import sample
from .sampling_params import SamplingParams
from .sampling_rows import SamplingRows
from .upload import upload


def profile_peak_bytes(
    model: CausalLM,
    shape: KVCacheShape,
    *,
    device: torch.device,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    is_paged: bool,
) -> int:
    """Return the most bytes that torch held during a full step, weights included, its KV cache left out.

    is_paged: attention reads block tables, on the device
    Raises torch.OutOfMemoryError when even that does not fit.
    """
    num_full, rest = divmod(max_num_batched_tokens, max_model_len)
    query_lens = np.array([max_model_len] * num_full + [rest] * (rest > 0), dtype=np.int64)
    blocks_per_row = -(-int(query_lens.max()) // shape.block_size)
    num_groups = len(shape.groups)
    num_blocks = 1 + num_groups * blocks_per_row * len(query_lens)
    kv_caches = make_kv_caches(shape, num_blocks, device)
    kv_bytes = num_blocks * shape.bytes_per_block
    rows = StepRows(
        query_lens=query_lens,
        kv_lens=query_lens,
        block_tables=np.arange(1, num_blocks, dtype=np.int64).reshape(
            num_groups, len(query_lens), blocks_per_row
        ),
        block_size=shape.block_size,
    )
    torch.cuda.reset_peak_memory_stats(device)
    if is_paged:
        context = paged_context(rows, shape.windows, device)
    else:
        context = build_forward_context(rows, windows=shape.windows, dtype=shape.dtype, device=device)
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in query_lens])).to(device)
    hidden = model(torch.zeros_like(positions), positions, kv_caches, context)
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    _sample(model.compute_logits(hidden[:num_rows].contiguous()))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - kv_bytes
    del kv_caches, hidden, context
    torch.cuda.empty_cache()
    return peak


def paged_context(rows: StepRows, windows: Sequence[int | None], device: torch.device) -> ForwardContext:
    """Lay out a step for `is_paged`. Every row is a prompt, even one of a single token."""
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(rows.query_lens)])
    prompt_starts, kv_lens, tables, slots = upload(
        [starts, rows.kv_lens, rows.block_tables, slot_mapping(rows)], device
    )
    return ForwardContext(
        windows=windows,
        slot_mappings=slots.unbind(0),
        rows=PagedRows(
            num_rows=len(rows.query_lens),
            num_decode_rows=0,
            prompt_starts=prompt_starts.int(),
            kv_lens=kv_lens.int(),
            block_tables=tables.int().unbind(0),
            max_query_len=int(rows.query_lens.max()),
            max_kv_len=int(rows.kv_lens.max()),
        ),
    )


def _sample(logits: torch.Tensor) -> None:
    """Sample with every filter and penalty on, and with log-probabilities: the most that sampling takes."""
    num_rows, vocab_size = logits.shape
    rows = SamplingRows(max_num_seqs=num_rows, vocab_size=vocab_size, device=logits.device)
    params = SamplingParams(top_p=0.9, min_p=0.01, presence_penalty=0.1, logprobs=0)
    for row in range(num_rows):
        rows.add(
            row,
            NewRequest(
                request_id=str(row),
                token_ids=[0],
                num_prompt_tokens=1,
                num_computed_tokens=0,
                block_ids=[],
                sampling_params=params,
                seed=row,
            ),
        )
    batch = rows.batch(np.arange(num_rows), np.zeros(num_rows, dtype=np.int64))
    rows.append(sample(logits, batch).token_ids)
