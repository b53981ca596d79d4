"""ModelRunner: SchedulerOutput -> tensors -> forward -> sampled tokens.

Called by: the Worker, once per step, on its main thread. All ranks of a replica run the same steps on the same
rows, sample from bit-equal logits or each from its part of them, and hence append the same tokens, without telling
each other.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from .config import LogprobsMode
from .forward_context import build_forward_context
from .input_batch import InputBatch, StepInput
from .layers.attention import LayerKVCache
from .logprobs import StepCopy
from .messages import GrammarMasks, LogprobTable, ModelRunnerOutput, SchedulerOutput
from .models.causal_lm import CausalLM
from .prompt_logprobs import PromptLogprobs
from .sampler import sample
from .vocab_columns import WHOLE, VocabColumns, VocabShard


def no_masks() -> GrammarMasks:
    """For steps that need no grammar masks."""
    raise RuntimeError("the step needs grammar masks, and nobody gives them")


class ModelRunner:
    """Runs steps of one rank's model over its KV cache.

    windows:  of the KV cache groups
    on_phase: told "input", "forward" and "sampling" as each begins
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[LayerKVCache],
        batch: InputBatch,
        *,
        windows: Sequence[int | None],
        dtype: torch.dtype,
        device: torch.device,
        on_phase: Callable[[str], None],
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._batch = batch
        self._windows = windows
        self._dtype = dtype
        self._device = device
        self._on_phase = on_phase
        head = model.head
        self._shard = VocabShard(head.group, head.span, head.vocab_size) if head.group.size > 1 else None
        self._prompt_logprobs = PromptLogprobs(
            model.compute_logits, vocab_size=model.config.vocab_size, mode=logprobs_mode
        )

    def execute_model(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks] = no_masks
    ) -> ModelRunnerOutput:
        """Compute one step.

        receive_masks: waits for the grammar masks, once the logits are under way; called exactly when the step
                       `needs_masks`, so that all ranks take in the same messages
        Raises RuntimeError when the step does not fit the rows held here; the replica must end then.
        """
        self._on_phase("input")
        for row in self._batch.update(scheduler_output):
            self._prompt_logprobs.drop(row)
        if not scheduler_output.num_scheduled_tokens:
            return ModelRunnerOutput(step=scheduler_output.step, request_ids=[], sampled_token_ids=[])
        step = self._batch.build_step(scheduler_output.num_scheduled_tokens)
        hidden = self._forward(step)
        for chunk in self._batch.prompt_chunks(step):
            self._prompt_logprobs.add(chunk, hidden)
        sampled, logprobs = self._sample(
            step, hidden, receive_masks if scheduler_output.needs_masks else None
        )
        self._batch.finish_step(step, sampled)
        request_ids = [step.request_ids[row] for row in step.sampling_rows.tolist()]
        rows = step.row_index[step.sampling_rows].tolist()
        prompt_tables = {
            request_id: table
            for request_id, row in zip(request_ids, rows, strict=True)
            if (table := self._prompt_logprobs.take(row)) is not None
        }
        return ModelRunnerOutput(
            step=scheduler_output.step,
            request_ids=request_ids,
            sampled_token_ids=sampled.tolist(),
            logprobs={request_ids[place]: table for place, table in logprobs.items()},
            prompt_logprobs=prompt_tables,
        )

    def _forward(self, step: StepInput) -> torch.Tensor:
        """Hidden states of the step: [num_tokens, hidden_size]."""
        token_ids = torch.from_numpy(step.token_ids).to(self._device)
        positions = torch.from_numpy(step.positions).to(self._device)
        context = build_forward_context(
            step.rows, windows=self._windows, dtype=self._dtype, device=self._device
        )
        self._on_phase("forward")
        hidden: torch.Tensor = self._model(token_ids, positions, self._kv_caches, context)
        return hidden

    def _sample(
        self, step: StepInput, hidden: torch.Tensor, receive_masks: Callable[[], GrammarMasks] | None
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], dict[int, LogprobTable]]:
        """Tokens of the rows that sample, and what is said of them, by the row's place.

        No rank enters the head when none samples: all see the same step.
        """
        if step.sampling_rows.size == 0:
            return np.zeros(0, dtype=np.int64), {}
        self._on_phase("sampling")
        last = torch.from_numpy(step.last_token_index).to(self._device)
        last_hidden = hidden.index_select(0, last)
        columns: VocabColumns = WHOLE
        if self._shard is None or self._batch.needs_whole_rows(step):
            logits = self._model.compute_logits(last_hidden)
        else:
            columns = self._shard
            logits = self._shard.fill(self._model.compute_own_logits(last_hidden))
        masks = None
        if receive_masks is not None:
            masks = receive_masks()
            self._on_phase("sampling")
        batch = self._batch.sampling_batch(step, masks)
        sampled = sample(logits, batch, columns)
        self._batch.sampling.append(sampled.token_ids)
        return StepCopy(sampled.token_ids, batch.logprobs, sampled.logprobs).wait()
