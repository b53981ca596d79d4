"""From a model on a GPU to its recorded steps.

Called by: Worker, whenever it has made a KV cache; compile_kernels.py puts a decode step together by it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .cuda_graphs import StepGraphs, decode_sizes, prompt_sizes
from .decode_step import DecodeOutput, DecodeStep, PrepareFunction
from .device_rows import DeviceRows
from .errors import DeviceMemoryError, GraphError
from .forward_context import ForwardContext
from .kernels.decode_inputs import DecodeInputs
from .layers.attention import LayerKVCache
from .models.causal_lm import CausalLM
from .paged_rows import PagedRows
from .prompt_step import PromptStep
from .transformer_config import TransformerConfig
from .worker_config import WorkerConfig

STARVING_FLOPS = 1e13
"""Of a step with prompts that is launched kernel by kernel: below it the GPU waits for the host, to which 32 layers are
about 18 ms of work. Measured on an H200."""
ROUNDED_TO = 64
"""Tokens: products like even numbers of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """Steps and their recordings; those with prompts may have none."""

    decode: DecodeStep
    decode_graphs: StepGraphs[DecodeOutput]
    prompts: PromptStep
    prompt_graphs: StepGraphs[torch.Tensor]

    def capture(self, on_progress: Callable[[int, int], None]) -> None:
        """Record all, in one pool of memory: no two steps run at a time. See `StepGraphs.capture`."""
        total = len(self.decode_graphs.sizes) + len(self.prompt_graphs.sizes)
        num_done = 0

        def on_size() -> None:
            nonlocal num_done
            num_done += 1
            on_progress(num_done, total)

        pool = torch.cuda.graph_pool_handle()
        # Those with prompts first: they take the most memory, which the others then find there.
        self.prompt_graphs.capture(pool, on_size)
        self.decode_graphs.capture(pool, on_size)
        # What steps took before they were recorded belongs to a stream on which nothing runs from now on.
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Give the recordings up. Idempotent."""
        self.decode_graphs.close()
        self.prompt_graphs.close()


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


def max_prompt_tokens(config: TransformerConfig, *, num_ranks: int, most: int) -> int:
    """Return how many tokens the largest step with prompts has that is worth a recording: see STARVING_FLOPS.

    The same on every rank, also where one has more of the weights than another: they record together.
    """
    worthwhile = int(STARVING_FLOPS * num_ranks / (2 * config.num_layer_weights))
    return min(most, -(-worthwhile // ROUNDED_TO) * ROUNDED_TO)


def record_steps(
    model: CausalLM,
    kv_caches: Sequence[LayerKVCache],
    rows: DeviceRows,
    config: WorkerConfig,
    *,
    windows: Sequence[int | None],
    max_model_len: int,
    max_recorded_tokens: int,
    device: torch.device,
    on_progress: Callable[[int, int], None],
) -> RecordedSteps:
    """Record decode steps, and steps with prompts as far as that helps. Raises DeviceMemoryError, GraphError.

    max_recorded_tokens: of a step with prompts, as the attention backend has it
    on_progress: told how many recordings of how many are done
    Ranks of a replica do so at the same time: each step is computed before it is recorded, with the exchanges in it.
    """
    from .kernels.triton_decode_inputs import make_decode_inputs

    decode = make_decode_step(
        model,
        kv_caches,
        rows,
        windows=windows,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=config.cache.block_size,
        device=device,
        prepare=make_decode_inputs,
    )
    max_tokens = max_prompt_tokens(
        model.config,
        num_ranks=config.parallel.tensor_parallel_size,
        most=min(max_recorded_tokens, config.max_num_batched_tokens),
    )
    sizes = prompt_sizes(max_tokens)
    prompts = PromptStep(
        model,
        kv_caches,
        rows,
        windows=windows,
        max_tokens=max_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        device=device,
    )
    recorded = RecordedSteps(
        decode=decode,
        decode_graphs=StepGraphs(
            decode.load_padding, decode.compute, decode_sizes(config.max_num_seqs), device
        ),
        prompts=prompts,
        prompt_graphs=StepGraphs(prompts.load_padding, prompts.compute, sizes, device),
    )
    try:
        recorded.capture(on_progress)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"no room on {device} for CUDA graphs beside the KV cache; lower cache.memory_utilization, "
            "scheduler.max_num_seqs or scheduler.max_num_batched_tokens, or set model.enforce_eager"
        ) from error
    except RuntimeError as error:
        raise GraphError(
            f"a step cannot be recorded on {device}; set model.enforce_eager: {error}"
        ) from error
    return recorded
