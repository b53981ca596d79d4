"""The "triton" attention backend: our own kernels for both kinds of rows. Called by: see backend.py."""

import torch

from ..kernels.decode_attention import DecodeScratch, DecodeTuning, decode_attention
from ..kernels.prefill_attention import prefill_attention
from ..kernels.single_row_attention import single_row_attention, splits_for
from .backend import AttentionBackend, AttentionShape

_PROGRAMS_PER_MULTIPROCESSOR = 2


class TritonAttention(AttentionBackend):
    """Any head size, number of heads and block size; float32, float16 and bfloat16."""

    name = "triton"

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

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        kv_lens: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        splits = 0
        if window is None:
            num_rows, num_heads, head_size = q.shape
            splits = splits_for(
                self._scratch,
                num_rows=num_rows,
                num_heads=num_heads,
                num_kv_heads=k_cache.shape[2],
                head_size=head_size,
                block_size=k_cache.shape[1],
            )
        if splits:
            single_row_attention(
                q, k_cache, v_cache, block_tables, kv_lens, self._scratch, splits=splits, scale=scale, out=out
            )
            return
        decode_attention(
            q, k_cache, v_cache, block_tables, kv_lens, self._scratch, scale=scale, window=window, out=out
        )

    def prefill(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        kv_lens: torch.Tensor,
        query_starts: torch.Tensor,
        out: torch.Tensor | None,
        *,
        max_query_len: int,
        max_kv_len: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        return prefill_attention(
            q,
            k_cache,
            v_cache,
            block_tables,
            kv_lens,
            query_starts,
            max_query_len=max_query_len,
            scale=scale,
            window=window,
            out=out,
        )
