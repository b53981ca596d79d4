"""compile_kernels: all that a model's steps launch, compiled before the first of them.

Called by: Worker, on a GPU, once.

The steps are gone through as they will be, prompts and decode steps of the sizes that differ, but Triton's kernels are
compiled instead of launched. What they would have written holds anything then, so nothing may be looked up by it:
positions and rows come from elsewhere.
"""

import os
from typing import Any

import numpy as np
import torch

from .cuda_graphs import SMALL_SIZES
from .decode_graphs import make_decode_step
from .device_rows import DeviceRows
from .forward_context import StepRows
from .kernels.decode_inputs import DecodeInputs, make_decode_inputs
from .memory import KVCacheShape, make_kv_caches
from .models.causal_lm import CausalLM
from .profile_run import paged_context

MAX_THREADS = 16


def compile_kernels(
    model: CausalLM,
    shape: KVCacheShape,
    *,
    max_num_seqs: int,
    max_model_len: int,
    device: torch.device,
) -> None:
    """See the module. Kernels that only some requests need, as filters, are compiled when they come."""
    # Imported here: Triton is there only where there is a GPU.
    from .kernels import triton_decode_inputs
    from .kernels.compile_ahead import compiling_ahead

    num_groups = len(shape.groups)
    kv_caches = make_kv_caches(shape, 1 + num_groups, device)
    rows = DeviceRows(
        max_num_seqs=max_num_seqs,
        num_kv_groups=num_groups,
        max_blocks=-(-max_model_len // shape.block_size),
        device=device,
    )

    def prepare(*arguments: torch.Tensor, **settings: Any) -> DecodeInputs:
        triton_decode_inputs.make_decode_inputs(*arguments, **settings)
        return make_decode_inputs(*arguments, **settings)

    decode = make_decode_step(
        model,
        kv_caches,
        rows,
        windows=shape.windows,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=shape.block_size,
        device=device,
        prepare=prepare,
    )
    with compiling_ahead(min(MAX_THREADS, os.cpu_count() or 1)):
        num_tokens = min(2, shape.block_size)
        lens = np.full(1, num_tokens, dtype=np.int64)
        prompt = StepRows(
            query_lens=lens,
            kv_lens=lens,
            block_tables=np.ones((num_groups, 1, 1), dtype=np.int64),
            block_size=shape.block_size,
        )
        positions = torch.arange(num_tokens, device=device)
        model(torch.zeros_like(positions), positions, kv_caches, paged_context(prompt, shape.windows, device))
        for size in sorted({min(size, max_num_seqs) for size in (*SMALL_SIZES, max_num_seqs)}):
            decode.load_padding(size)
            decode.compute(size)
    torch.cuda.synchronize(device)
