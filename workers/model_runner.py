"""ModelRunner: SchedulerOutput -> tensors -> forward -> sampled tokens.

Called by: the Worker, once per step, on its main thread. All ranks of a replica run the same steps on the same
rows, sample from bit-equal logits or each from its part of them, and hence choose the same tokens, without telling
each other.

A step is launched by `begin` and waited for later: sampled tokens stay on the device, where the next step finds them.
Two ways lead from a step to its tokens:

    decode graph   every row has one new token and is drawn plainly: one copy in, one CUDA graph, one copy out
    by parts       everything else: the model's pass (forward_pass.py, recorded or not), and then the choice of tokens
                   as the rows want it, launched kernel by kernel
"""

from collections.abc import Callable, Sequence

import torch

from .config import LogprobsMode
from .forward_pass import ForwardPass
from .input_batch import InputBatch
from .layers.attention import LayerKVCache
from .logprobs import HostCopy, StepCopy
from .messages import GrammarMasks, LogprobTable, ModelRunnerOutput, SchedulerOutput
from .models.causal_lm import CausalLM
from .prompt_logprobs import PromptLogprobs
from .recorded_steps import RecordedSteps
from .sampler import sample
from .step_in_flight import FinishedStep, LaunchedStep, StepInFlight
from .step_input import DecodeRows, SampledTokens, StepInput
from .vocab_columns import WHOLE, VocabColumns, VocabShard


def no_masks() -> GrammarMasks:
    """For steps that need no grammar masks."""
    raise RuntimeError("the step needs grammar masks, and nobody gives them")


class ModelRunner:
    """Runs steps of one rank's model over its KV cache.

    windows:  of the KV cache groups
    is_paged: attention reads block tables, on the device
    on_phase: told "input", "forward" and "sampling" as each begins
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[LayerKVCache],
        batch: InputBatch,
        *,
        windows: Sequence[int | None],
        device: torch.device,
        on_phase: Callable[[str], None],
        is_paged: bool = False,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        self._model = model
        self._batch = batch
        self._on_phase = on_phase
        self._forward = ForwardPass(
            model, kv_caches, batch, windows=windows, device=device, is_paged=is_paged
        )
        head = model.head
        self._shard = VocabShard(head.group, head.span, head.vocab_size) if head.group.size > 1 else None
        self._prompt_logprobs = PromptLogprobs(
            model.compute_logits, vocab_size=model.config.vocab_size, mode=logprobs_mode
        )
        self._recorded: RecordedSteps | None = None

    def use_graphs(self, recorded: RecordedSteps) -> None:
        """Compute by these steps wherever they can."""
        self._recorded = recorded
        self._forward.use_graphs(recorded)

    def close(self) -> None:
        """Give the recorded steps up, also while some are under way. Idempotent."""
        if self._recorded is not None:
            self._recorded.close()

    def execute_model(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks] = no_masks
    ) -> ModelRunnerOutput:
        """Compute one step: `begin(...).wait()`."""
        return self.begin(scheduler_output, receive_masks).wait()

    def begin(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks] = no_masks
    ) -> StepInFlight:
        """Launch one step. On a GPU this returns before it is computed.

        receive_masks: waits for the grammar masks, once the logits are under way; called exactly when the step
                       `needs_masks`, so that all ranks take in the same messages
        Raises RuntimeError when the step does not fit the rows held here; the replica must end then.
        """
        self._on_phase("input")
        for row in self._batch.update(scheduler_output):
            self._prompt_logprobs.drop(row)
        if not scheduler_output.num_scheduled_tokens:
            return FinishedStep(
                ModelRunnerOutput(step=scheduler_output.step, request_ids=[], sampled_token_ids=[])
            )
        if self._recorded is not None:
            size = self._recorded.decode_graphs.size_for(len(scheduler_output.num_scheduled_tokens))
            rows = None if size is None else self._batch.take_decode_rows(scheduler_output)
            if size is not None and rows is not None:
                return self._replay(self._recorded, scheduler_output.step, size, rows)
        return self._run_by_parts(scheduler_output, receive_masks)

    def _replay(self, recorded: RecordedSteps, step: int, size: int, rows: DecodeRows) -> StepInFlight:
        recorded.decode.load(size, rows.row_index, rows.positions, rows.sample_positions, rows.new_blocks)
        self._on_phase("forward")
        tokens = recorded.decode_graphs.replay(size).tokens
        copy = HostCopy([tokens[: len(rows.request_ids)]])

        def finish() -> ModelRunnerOutput:
            (token_ids,) = copy.wait()
            self._batch.learn(rows.sampled, token_ids.numpy())
            return ModelRunnerOutput(
                step=step, request_ids=rows.request_ids, sampled_token_ids=token_ids.tolist()
            )

        return LaunchedStep(copy, finish)

    def _run_by_parts(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks]
    ) -> StepInFlight:
        step = self._batch.build_step(scheduler_output.num_scheduled_tokens)
        self._on_phase("forward")
        chunks = self._batch.prompt_chunks(step)
        hidden = self._forward.run(step, needs_all=bool(chunks))
        for chunk in chunks:
            assert hidden.of_tokens is not None
            self._prompt_logprobs.add(chunk, hidden.of_tokens)
        copy = None
        # No rank enters the head when no row samples: all see the same step.
        if step.sampling_rows.size > 0:
            self._on_phase("sampling")
            columns: VocabColumns = WHOLE
            if self._shard is None or self._batch.needs_whole_rows(step):
                logits = self._model.compute_logits(hidden.of_samples)
            else:
                columns = self._shard
                logits = self._shard.fill(self._model.compute_own_logits(hidden.of_samples))
            masks = None
            if scheduler_output.needs_masks:
                masks = receive_masks()
                self._on_phase("sampling")
            sampling = self._batch.sampling_batch(step, masks)
            sampled = sample(logits, sampling, columns)
            self._batch.sampling.append(sampled.token_ids)
            self._batch.on_device.last_tokens.index_copy_(0, hidden.sampling_row_index, sampled.token_ids)
            copy = StepCopy(sampled.token_ids, sampling.logprobs, sampled.logprobs)
        return self._await_copy(scheduler_output.step, step, self._batch.finish_step(step), copy)

    def _await_copy(
        self, number: int, step: StepInput, sampled: SampledTokens, copy: StepCopy | None
    ) -> StepInFlight:
        # In the scheduler's order, whatever the order on the device.
        order = sorted(
            range(step.sampling_rows.size), key=step.places[step.sampling_rows].tolist().__getitem__
        )
        request_ids = [step.request_ids[row] for row in step.sampling_rows.tolist()]
        rows = step.row_index[step.sampling_rows].tolist()
        # Taken now: with the next step a row may be another request's.
        prompt_tables = {
            request_id: table
            for request_id, row in zip(request_ids, rows, strict=True)
            if (table := self._prompt_logprobs.take(row)) is not None
        }

        def output(tokens: Sequence[int], tables: dict[int, LogprobTable]) -> ModelRunnerOutput:
            return ModelRunnerOutput(
                step=number,
                request_ids=[request_ids[place] for place in order],
                sampled_token_ids=[tokens[place] for place in order],
                logprobs={request_ids[place]: table for place, table in tables.items()},
                prompt_logprobs=prompt_tables,
            )

        if copy is None:
            return FinishedStep(output([], {}))
        arrived = copy

        def finish() -> ModelRunnerOutput:
            tokens, tables = arrived.wait()
            self._batch.learn(sampled, tokens)
            return output(tokens.tolist(), tables)

        return LaunchedStep(arrived, finish)
