"""The "triton" attention backend: our own kernels for both kinds of rows. Called by: see backend.py."""

import torch

from ..kernels.decode_attention import DecodeScratch, DecodeTuning, decode_attention
from ..kernels.prefill_attention import prefill_attention
from ..kernels.single_row_attention import single_row_attention, splits_for
from .backend import AttentionBackend, AttentionShape, PromptLens, SeenCache

_PROGRAMS_PER_MULTIPROCESSOR = 2


class TritonAttention(AttentionBackend):
    """Any head size, number of heads and block size; float32, float16 and bfloat16."""

    name = "triton"
    # For 11392 tokens it would be a third of a million programs a layer, nearly all of which end at once.
    max_recorded_tokens = 1024

    def __init__(self, shape: AttentionShape) -> None:
        num_programs = DecodeTuning().num_programs
        if shape.device.type == "cuda":
            properties = torch.cuda.get_device_properties(shape.device)
            num_programs = _PROGRAMS_PER_MULTIPROCESSOR * properties.multi_processor_count
        self._scratch = DecodeScratch(
            max_rows=shape.max_rows,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            tuning=DecodeTuning.for_heads(shape.head_size, shape.dtype, num_programs=num_programs),
            device=shape.device,
        )

    def decode(self, q: torch.Tensor, seen: SeenCache, out: torch.Tensor) -> None:
        num_rows, num_heads, head_size = q.shape
        splits = 0
        if seen.window is None:
            splits = splits_for(
                self._scratch,
                num_rows=num_rows,
                num_heads=num_heads,
                num_kv_heads=seen.k_cache.shape[2],
                head_size=head_size,
                block_size=seen.k_cache.shape[1],
            )
        cache = (seen.k_cache, seen.v_cache, seen.block_tables, seen.kv_lens)
        if splits:
            single_row_attention(q, *cache, self._scratch, splits=splits, scale=seen.scale, out=out)
        else:
            decode_attention(q, *cache, self._scratch, scale=seen.scale, window=seen.window, out=out)

    def prefill(self, q: torch.Tensor, seen: SeenCache, lens: PromptLens) -> torch.Tensor:
        return prefill_attention(
            q,
            seen.k_cache,
            seen.v_cache,
            seen.block_tables,
            seen.kv_lens,
            lens.query_starts,
            max_query_len=lens.max_query_len,
            scale=seen.scale,
            window=seen.window,
        )
