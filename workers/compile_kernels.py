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

from .config import LogprobsMode
from .cuda_graphs import SMALL_SIZES
from .device_rows import DeviceRows
from .forward_context import StepRows
from .kernels.decode_inputs import DecodeInputs, make_decode_inputs
from .memory import KVCacheShape, make_kv_caches
from .messages import NewRequest
from .models.causal_lm import CausalLM
from .profile_run import paged_context
from .recorded_steps import make_decode_step
from .sampler import sample
from .sampling_params import SamplingParams
from .sampling_rows import GrammarWords, SamplingRows

MAX_THREADS = 16


def compile_kernels(
    model: CausalLM,
    shape: KVCacheShape,
    *,
    max_num_seqs: int,
    max_model_len: int,
    logprobs_mode: LogprobsMode,
) -> None:
    """See the module."""
    # Imported here: Triton is there only where there is a GPU.
    from .kernels import triton_decode_inputs, triton_few_rows, triton_linear
    from .kernels.compile_ahead import compiling_ahead

    device = next(model.parameters()).device
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
        # Also numbers of rows that no recording has: the last layer of a step with prompts has as many as are sampled.
        sizes = (*SMALL_SIZES, *range(1, triton_linear.MAX_ROWS), *triton_few_rows.ROW_PADS, max_num_seqs)
        for size in sorted({min(size, max_num_seqs) for size in sizes}):
            decode.load_padding(size)
            decode.compute(size)
        _sample(model, logprobs_mode)
    torch.cuda.synchronize(device)


def _sample(model: CausalLM, logprobs_mode: LogprobsMode) -> None:
    """Sample as steps do that hold prompts. Nothing is looked up by the tokens, which are none."""
    weight = next(model.parameters())
    vocab_size, dtype, device = model.config.vocab_size, weight.dtype, weight.device
    filters = {"top_p": 0.9, "min_p": 0.01}
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"logprobs": 1},
        filters,
        {**filters, "logprobs": 1},
    ]
    edits: dict[str, Any] = {
        "allowed_token_ids": (0,),
        "bad_words_token_ids": ((0,),),
        "logit_bias": {0: 1.0},
        "frequency_penalty": 1.0,
        "logprobs": 1,
    }
    every_token = np.full((1, -(-vocab_size // 32)), -1, dtype=np.int32)
    cases = [SamplingParams(**(choice | changes)) for choice in choices for changes in ({}, edits)]
    rows = SamplingRows(
        max_num_seqs=len(cases), vocab_size=vocab_size, device=device, logprobs_mode=logprobs_mode
    )
    for row, params in enumerate(cases):
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
        grammar = GrammarWords(places=[0], words=every_token) if params.logit_bias else None
        batch = rows.batch(np.full(1, row, dtype=np.int64), np.zeros(1, dtype=np.int64), grammar)
        sample(torch.zeros((1, vocab_size), dtype=dtype, device=device), batch)
