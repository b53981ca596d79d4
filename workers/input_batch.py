"""InputBatch: the requests that a rank holds, as rows of arrays on the host.

Called by: the model runner, once per step. One owner, one thread, in a worker process; every rank of a replica
holds the same rows. Running requests arrive as differences, so the rows keep each request's tokens and its block
table. A step is laid out before the one ahead of it is back, so the host does not know what was sampled: such a token
stands here as `ON_DEVICE` until it is known, and is in `DeviceRows.last_tokens`. Only a row's last token can be one.

Invariant: num_computed_tokens <= num_tokens of every row; a row's number does not change while it is held. A
difference that does not fit what is held means that scheduler and worker have lost step: RuntimeError, which ends
the replica.
"""

import heapq
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from .config import LogprobsMode
from .device_rows import DeviceRows
from .forward_context import StepRows
from .messages import GrammarMasks, NewRequest, RowState, SchedulerOutput
from .prompt_logprobs import PromptChunk
from .sampling_batch import SamplingBatch
from .sampling_rows import GrammarWords, SamplingRows, is_plain
from .step_input import ON_DEVICE, DecodeRows, Ints, SampledTokens, StepInput


class InputBatch:
    """Rows of the running batch. See the module.

    is_paged: attention reads block tables on the device, so they are kept there too, and rows with one new token stand
              first in a step
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        num_kv_groups: int = 1,
        is_paged: bool = False,
    ) -> None:
        self._block_size = block_size
        self._is_paged = is_paged
        self.sampling = SamplingRows(
            max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device, logprobs_mode=logprobs_mode
        )
        """What the sampler must know of the rows."""
        # Sampled tokens of steps in flight may pass the limit by one. Memory is touched only as far as it is used.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 2), dtype=np.int32)
        # A table of each KV cache group; all have the same number of entries for a row.
        max_blocks = -(-(max_model_len + 2) // block_size)
        self.on_device = DeviceRows(
            max_num_seqs=max_num_seqs,
            num_kv_groups=num_kv_groups if is_paged else 0,
            max_blocks=max_blocks,
            device=device,
        )
        """The rows' last tokens, and what else the device must hold of them."""
        self._blocks = np.zeros((num_kv_groups, max_num_seqs, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self._is_plain = np.zeros(max_num_seqs, dtype=np.bool_)
        # The row's last token was sampled here, so the device has it.
        self._has_sampled = np.zeros(max_num_seqs, dtype=np.bool_)
        # How many requests have held the row.
        self._holders = np.zeros(max_num_seqs, dtype=np.int64)
        # Rows that want log-probabilities of their prompt: how many likeliest tokens, and where padding begins.
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}
        self._vocab_size = vocab_size
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs))

    @property
    def request_ids(self) -> list[str]:
        """Requests held, in the order in which they came."""
        return list(self._rows)

    def update(self, scheduler_output: SchedulerOutput) -> list[int]:
        """Drop removed rows, add new ones, extend running ones. Returns the numbers of the rows that were dropped.

        Raises RuntimeError when the scheduler's view of a row is not ours.
        """
        dropped = []
        for request_id in scheduler_output.removed_request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self.sampling.remove(row)
                self._prompt_logprobs.pop(row, None)
                heapq.heappush(self._free_rows, row)
                dropped.append(row)
        for new in scheduler_output.new_requests:
            self._add(new)
        self._send_sampling(scheduler_output.new_requests)
        for request_id, block_ids in scheduler_output.new_block_ids.items():
            self._extend(request_id, block_ids)
        for request_id, state in scheduler_output.row_states.items():
            self._check_row(request_id, state)
        rows = [self._row_of(request_id) for request_id in scheduler_output.num_scheduled_tokens]
        expected = np.array(scheduler_output.num_computed_tokens, dtype=np.int64)
        if len(expected) != len(rows) or (self._num_computed[rows] != expected).any():
            raise RuntimeError(
                f"the scheduler counts computed tokens as {scheduler_output.num_computed_tokens}, and they are "
                f"{self._num_computed[rows].tolist()} here"
            )
        return dropped

    def build_step(self, num_scheduled_tokens: dict[str, int]) -> StepInput:
        """Lay the step's tokens side by side. Raises RuntimeError when a row has not that many tokens."""
        request_ids = list(num_scheduled_tokens)
        row_index = np.array([self._row_of(request_id) for request_id in request_ids], dtype=np.int64)
        query_lens = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(request_ids))
        places = np.arange(len(request_ids))
        if self._is_paged:
            places = np.argsort(query_lens > 1, kind="stable")
            request_ids = [request_ids[place] for place in places.tolist()]
            row_index, query_lens = row_index[places], query_lens[places]
        computed = self._num_computed[row_index]
        kv_lens = computed + query_lens
        if (query_lens < 1).any() or (kv_lens > self._num_tokens[row_index]).any():
            raise RuntimeError(
                f"the step schedules tokens that its requests do not have: {num_scheduled_tokens}"
            )
        if (kv_lens > self._num_blocks[row_index] * self._block_size).any():
            raise RuntimeError("the step schedules tokens for which its requests have no blocks")
        ends = np.cumsum(query_lens)
        row_of_token = np.repeat(np.arange(len(request_ids)), query_lens)
        positions = np.arange(len(row_of_token)) - (ends - query_lens - computed)[row_of_token]
        sampling_rows = np.flatnonzero(kv_lens == self._num_tokens[row_index])
        max_blocks = -(-int(kv_lens.max()) // self._block_size)
        return StepInput(
            request_ids=request_ids,
            row_index=row_index,
            places=places,
            row_of_token=row_of_token,
            token_ids=self._token_ids[row_index[row_of_token], positions].astype(np.int64),
            positions=positions,
            rows=StepRows(
                query_lens=query_lens,
                kv_lens=kv_lens,
                block_tables=self._blocks[:, row_index, :max_blocks].astype(np.int64),
                block_size=self._block_size,
            ),
            sampling_rows=sampling_rows,
            last_token_index=(ends - 1)[sampling_rows],
        )

    def take_decode_rows(self, scheduler_output: SchedulerOutput) -> DecodeRows | None:
        """Return the step as rows of one token each, and count it as computed; None when it is not such a step.

        Nothing has changed when None is returned. Raises RuntimeError when a row has no block for its token.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        num_rows = len(scheduled)
        if scheduler_output.needs_masks or sum(scheduled.values()) != num_rows:
            return None
        row_index = np.fromiter(map(self._row_of, scheduled), dtype=np.int64, count=num_rows)
        positions = self._num_computed[row_index]
        new_blocks = None
        if self._is_plain[row_index].all():
            new_blocks = self.take_decode_blocks(row_index, positions)
        if new_blocks is None:
            return None
        kv_lens = positions + 1
        self._num_computed[row_index] = kv_lens
        self._token_ids[row_index, kv_lens] = ON_DEVICE
        self._num_tokens[row_index] += 1
        return DecodeRows(
            request_ids=list(scheduled),
            row_index=row_index,
            positions=positions,
            sample_positions=kv_lens - self._num_prompt[row_index],
            new_blocks=new_blocks,
            sampled=SampledTokens(rows=row_index, places=kv_lens, holders=self._holders[row_index]),
        )

    def take_decode_blocks(self, row_index: Ints, positions: Ints) -> Ints | None:
        """Return the blocks that rows of one token each need for it and the device has not; None when it lacks a token.

        row_index, positions: [n]; of a step in which every row has one new token
        Returns [num_kv_groups, n], -1 where nothing is new. Nothing has changed when None is returned. Raises
        RuntimeError when a row has no block for its token.
        """
        kv_lens = positions + 1
        # A prompt's token, or one that the row brought along, is on the host alone; after the last one none is drawn.
        is_there = self._has_sampled[row_index] & (kv_lens == self._num_tokens[row_index])
        if not is_there.all() or (kv_lens >= self._token_ids.shape[1]).any():
            return None
        if (kv_lens > self._num_blocks[row_index] * self._block_size).any():
            raise RuntimeError("the step schedules tokens for which its requests have no blocks")
        new_blocks = self.on_device.take_decode_blocks(row_index, positions // self._block_size)
        if new_blocks is None:
            self.on_device.send_blocks()
            new_blocks = np.full((self._blocks.shape[0], len(row_index)), -1, dtype=np.int64)
        return new_blocks

    def sampling_batch(self, step: StepInput, masks: GrammarMasks | None = None) -> SamplingBatch:
        """Parameters of the rows that sample in this step.

        masks: of those that have a grammar. Raises RuntimeError when one of them does not sample.
        """
        rows = step.row_index[step.sampling_rows]
        num_outputs = self._num_tokens[rows] - self._num_prompt[rows]
        return self.sampling.batch(rows, num_outputs, self._grammar_words(step, masks) if masks else None)

    def needs_whole_rows(self, step: StepInput) -> bool:
        """True when the step cannot be sampled from each rank's part of the rows."""
        return self.sampling.needs_whole_rows(step.row_index[step.sampling_rows])

    def prompt_chunks(self, step: StepInput) -> list[PromptChunk]:
        """Return what this step computes of prompts whose log-probabilities are wanted."""
        if not self._prompt_logprobs:
            return []
        ends = np.cumsum(step.rows.query_lens)
        chunks = []
        for at, row in enumerate(step.row_index.tolist()):
            if row not in self._prompt_logprobs:
                continue
            num_top, vocab_limit = self._prompt_logprobs[row]
            first = int(self._num_computed[row])
            start = int(ends[at] - step.rows.query_lens[at])
            # The last prompt token says nothing of the prompt: what follows it is output.
            count = min(int(step.rows.query_lens[at]), int(self._num_prompt[row]) - 1 - first)
            chunks.append(
                PromptChunk(
                    row=row,
                    start=start,
                    stop=start + count,
                    next_ids=self._token_ids[row, first + 1 : first + 1 + count].astype(np.int64),
                    num_top=num_top,
                    vocab_limit=vocab_limit,
                )
            )
            if first + int(step.rows.query_lens[at]) >= self._num_prompt[row]:
                del self._prompt_logprobs[row]
        return chunks

    def finish_step(self, step: StepInput) -> SampledTokens:
        """Count the step's tokens as computed, and give the rows that sample one more: what it is, is on the device."""
        self._num_computed[step.row_index] = step.rows.kv_lens
        rows = step.row_index[step.sampling_rows]
        # A request whose last token came while this step was under way is at the limit; what it sampled is dropped.
        places = np.where(self._num_tokens[rows] < self._token_ids.shape[1], self._num_tokens[rows], -1)
        sampled = SampledTokens(rows=rows, places=places, holders=self._holders[rows])
        self._write(sampled, np.full(len(rows), ON_DEVICE, dtype=np.int64))
        self._num_tokens[rows] += places >= 0
        self._has_sampled[rows] = True
        return sampled

    def learn(self, sampled: SampledTokens, token_ids: Ints) -> None:
        """Take over tokens of a step that is back. Rows that are other requests' by now are left alone."""
        self._write(sampled, token_ids)

    def _write(self, sampled: SampledTokens, token_ids: Ints) -> None:
        is_held = (self._holders[sampled.rows] == sampled.holders) & (sampled.places >= 0)
        self._token_ids[sampled.rows[is_held], sampled.places[is_held]] = token_ids[is_held]

    def _add(self, new: NewRequest) -> None:
        if new.request_id in self._rows:
            raise RuntimeError(f"request {new.request_id} is new to the scheduler, and held here already")
        if not self._free_rows:
            raise RuntimeError(f"request {new.request_id} comes when all rows are taken")
        num_tokens = len(new.token_ids)
        if num_tokens > self._token_ids.shape[1]:
            raise RuntimeError(f"request {new.request_id} with {num_tokens} tokens is longer than a row")
        row = heapq.heappop(self._free_rows)
        self._rows[new.request_id] = row
        self._token_ids[row, :num_tokens] = new.token_ids
        self._num_blocks[row] = 0
        self._extend(new.request_id, new.block_ids)
        self._num_tokens[row] = num_tokens
        self._num_computed[row] = new.num_computed_tokens
        self._num_prompt[row] = new.num_prompt_tokens
        self._has_sampled[row] = False
        self._holders[row] += 1
        self._is_plain[row] = is_plain(new.sampling_params)
        self.sampling.add(row, new)
        wanted = new.sampling_params.prompt_logprobs
        # A request that has output has told of its prompt in an earlier life.
        if wanted is not None and num_tokens == new.num_prompt_tokens:
            if new.num_computed_tokens:
                raise RuntimeError(
                    f"request {new.request_id} wants all of its prompt, and finds a part of it"
                )
            self._prompt_logprobs[row] = (wanted, min(new.vocab_limit or self._vocab_size, self._vocab_size))

    def _extend(self, request_id: str, block_ids: list[int]) -> None:
        row = self._row_of(request_id)
        num_groups, _, max_blocks = self._blocks.shape
        added = np.array(block_ids, dtype=np.int32).reshape(-1, num_groups)
        start = int(self._num_blocks[row])
        stop = start + len(added)
        if stop > max_blocks:
            raise RuntimeError(f"request {request_id} with {stop} blocks is longer than a row")
        self._blocks[:, row, start:stop] = added.T
        if self._is_paged:
            self.on_device.add_blocks(row, start, added.T.astype(np.int64))
        self._num_blocks[row] = stop

    def _check_row(self, request_id: str, state: RowState) -> None:
        row = self._row_of(request_id)
        if self._num_tokens[row] != state.num_tokens:
            raise RuntimeError(
                f"request {request_id} has {state.num_tokens} tokens to the scheduler, and {self._num_tokens[row]} here"
            )
        known = self._token_ids[row, : state.num_known].astype("<i4")
        if zlib.crc32(known.tobytes()) != state.known_digest:
            raise RuntimeError(f"request {request_id} has other tokens to the scheduler than here")
        expected = np.array(state.block_ids, dtype=np.int32).reshape(-1, self._blocks.shape[0]).T
        held = self._blocks[:, row, : self._num_blocks[row]]
        if expected.shape != held.shape or ((expected != held) & (expected != 0)).any():
            raise RuntimeError(
                f"request {request_id} has the blocks {expected.tolist()} to the scheduler, and {held.tolist()} here"
            )

    def _send_sampling(self, added: Sequence[NewRequest]) -> None:
        if self._is_paged:
            self.on_device.set_sampling(
                [self._rows[new.request_id] for new in added],
                [new.sampling_params.temperature for new in added],
                [new.seed for new in added],
                [min(new.vocab_limit or self._vocab_size, self._vocab_size) for new in added],
            )

    def _row_of(self, request_id: str) -> int:
        row = self._rows.get(request_id)
        if row is None:
            raise RuntimeError(f"request {request_id} is scheduled, and not held here")
        return row

    def _grammar_words(self, step: StepInput, masks: GrammarMasks) -> GrammarWords:
        """Find the places of the rows that have a mask among those that sample."""
        places = {step.request_ids[row]: place for place, row in enumerate(step.sampling_rows.tolist())}
        if not places.keys() >= set(masks.request_ids):
            raise RuntimeError(f"a grammar is given for requests that do not sample: {masks.request_ids}")
        num_words = -(-self._vocab_size // 32)
        words = np.frombuffer(masks.bits, dtype="<i4").reshape(len(masks.request_ids), num_words)
        return GrammarWords(
            places=[places[request_id] for request_id in masks.request_ids], words=words.copy()
        )
