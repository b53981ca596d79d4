"""From a model on a GPU to its recorded decode steps. Called by: Worker, once, when the KV cache is there."""

from collections.abc import Callable, Sequence

import torch

from .cuda_graphs import DecodeGraphs, graph_sizes
from .decode_step import DecodeStep, PrepareFunction
from .device_rows import DeviceRows
from .errors import DeviceMemoryError, GraphError
from .forward_context import ForwardContext
from .kernels.decode_inputs import DecodeInputs
from .layers.attention import LayerKVCache
from .models.causal_lm import CausalLM
from .paged_rows import PagedRows


def make_decode_step(
    model: CausalLM,
    kv_caches: Sequence[LayerKVCache],
    rows: DeviceRows,
    *,
    windows: Sequence[int | None],
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    device: torch.device,
    prepare: PrepareFunction,
) -> DecodeStep:
    """Put a decode step together that may be recorded."""
    # Imported here: Triton is there only where there is a GPU.
    from .kernels.triton_best_rank import best_rank
    from .kernels.triton_draw import draw_part

    # There are no prompts.
    prompt_starts = torch.zeros(1, dtype=torch.int32, device=device)

    def make_context(inputs: DecodeInputs) -> ForwardContext:
        num_rows = inputs.kv_lens.shape[0]
        return ForwardContext(
            windows=windows,
            slot_mappings=inputs.slot_mappings.unbind(0),
            rows=PagedRows(
                num_rows=num_rows,
                num_decode_rows=num_rows,
                prompt_starts=prompt_starts,
                kv_lens=inputs.kv_lens,
                block_tables=inputs.block_tables.unbind(0),
                max_query_len=1,
                max_kv_len=max_model_len,
            ),
        )

    return DecodeStep(
        model,
        kv_caches,
        rows,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        device=device,
        make_context=make_context,
        prepare=prepare,
        draw=draw_part,
        best_rank=best_rank,
    )


def record_decode_graphs(
    model: CausalLM,
    kv_caches: Sequence[LayerKVCache],
    rows: DeviceRows,
    *,
    windows: Sequence[int | None],
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    device: torch.device,
    on_progress: Callable[[int, int], None],
) -> tuple[DecodeStep, DecodeGraphs]:
    """Record a decode step for each of `graph_sizes`. Raises DeviceMemoryError, GraphError.

    Ranks of a replica do so at the same time: each step is computed before it is recorded, with the exchanges in it.
    """
    from .kernels.triton_decode_inputs import make_decode_inputs

    decode = make_decode_step(
        model,
        kv_caches,
        rows,
        windows=windows,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        device=device,
        prepare=make_decode_inputs,
    )
    graphs = DecodeGraphs(decode.load_padding, decode.compute, graph_sizes(max_num_seqs), device)
    try:
        graphs.capture(on_progress)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"no room on {device} for CUDA graphs beside the KV cache; lower cache.memory_utilization or "
            "scheduler.max_num_seqs, or set model.enforce_eager"
        ) from error
    except RuntimeError as error:
        raise GraphError(
            f"a decode step cannot be recorded on {device}; set model.enforce_eager: {error}"
        ) from error
    return decode, graphs
