"""ForwardPass: a step's tokens through the model, by the quickest way that there is; and what follows needs of it.

Called by: the model runner, on the main thread of a worker process, for every step but those that one recording does
from end to end. All ranks take the same way, for it follows from the step alone, and meet in the layers' exchanges,
recorded or not: when a peer dies, they end as its group says (tp_group.py). Three ways:

    decode graph   every row has one new token, sampled before: the graph leaves its hidden states beside tokens
    prompt graph   a step with prompts that fits one of the recorded sizes
    eager          everything else, and wherever there are no graphs: every kernel is launched by the host
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .input_batch import InputBatch
from .layers.attention import LayerKVCache
from .models.causal_lm import CausalLM
from .recorded_steps import RecordedSteps
from .step_input import StepInput
from .step_tensors import make_step_tensors
from .upload import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHidden:
    """What the model has made of a step.

    of_tokens:          [num_tokens, hidden_size]; None when only what samples was asked for, and nothing else was
                        computed to its end
    of_samples:         [num_sampling, hidden_size], of the last tokens of the rows that sample; the next step may
                        overwrite it
    sampling_row_index: [num_sampling] int64 on the device, numbers of these rows
    """

    of_tokens: torch.Tensor | None
    of_samples: torch.Tensor
    sampling_row_index: torch.Tensor


class ForwardPass:
    """See the module.

    windows:  of the KV cache groups
    is_paged: attention reads block tables, on the device
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerKVCache],
        batch: InputBatch,
        *,
        windows: Sequence[int | None],
        device: torch.device,
        is_paged: bool,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._batch = batch
        self._windows = windows
        self._device = device
        self._is_paged = is_paged
        self._recorded: RecordedSteps | None = None

    def use_graphs(self, recorded: RecordedSteps) -> None:
        """Compute by these wherever they can."""
        self._recorded = recorded

    def run(self, step: StepInput, *, needs_all: bool) -> StepHidden:
        """Launch the model's pass over a step. Waits for nothing on a GPU.

        needs_all: every token's hidden states are wanted, not those alone that something is sampled from
        """
        of_samples = None
        if self._recorded is not None and not needs_all:
            if step.rows.query_lens.max() == 1:
                of_samples = self._replay_decode(self._recorded, step)
            if of_samples is None:
                of_samples = self._replay_prompts(self._recorded, step)
        if of_samples is None:
            return self._launch(step, needs_all=needs_all)
        (sampling_row_index,) = upload([step.row_index[step.sampling_rows]], self._device)
        return StepHidden(
            of_tokens=None,
            of_samples=of_samples[: step.sampling_rows.size],
            sampling_row_index=sampling_row_index,
        )

    def _replay_decode(self, recorded: RecordedSteps, step: StepInput) -> torch.Tensor | None:
        size = recorded.decode_graphs.size_for(len(step.row_index))
        if size is None:
            return None
        new_blocks = self._batch.take_decode_blocks(step.row_index, step.positions)
        if new_blocks is None:
            return None
        # What it draws is thrown away, so how many tokens the rows have does not matter.
        recorded.decode.load(size, step.row_index, step.positions, np.zeros_like(step.positions), new_blocks)
        return recorded.decode_graphs.replay(size).hidden

    def _replay_prompts(self, recorded: RecordedSteps, step: StepInput) -> torch.Tensor | None:
        num_prompts = int((step.rows.query_lens > 1).sum())
        size = recorded.prompt_graphs.size_for(recorded.prompts.size_needed(len(step.token_ids), num_prompts))
        if size is None:
            return None
        recorded.prompts.load(size, step)
        return recorded.prompt_graphs.replay(size)

    def _launch(self, step: StepInput, *, needs_all: bool) -> StepHidden:
        tensors = make_step_tensors(
            step,
            self._batch.on_device,
            windows=self._windows,
            dtype=self._model.activation_dtype,
            device=self._device,
            is_paged=self._is_paged,
        )
        inputs = (tensors.token_ids, tensors.positions, self._kv_caches, tensors.context)
        num_sampling = step.sampling_rows.size
        if needs_all or num_sampling == len(step.token_ids):
            hidden = self._model(*inputs)
            of_samples = hidden.index_select(0, tensors.last_token_index)
            return StepHidden(
                of_tokens=hidden, of_samples=of_samples, sampling_row_index=tensors.sampling_row_index
            )
        # Where nothing samples any token will do: kernels and exchanges like to have one.
        kept = tensors.last_token_index if num_sampling else tensors.positions.new_zeros(1)
        hidden = self._model(*inputs, kept)
        return StepHidden(
            of_tokens=None,
            of_samples=hidden[:num_sampling],
            sampling_row_index=tensors.sampling_row_index,
        )
