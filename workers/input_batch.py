"""InputBatch: the requests that a rank holds, as rows of arrays on the host.

Called by: the model runner, once per step. One owner, one thread, in a worker process; every rank of a replica
holds the same rows. Running requests arrive as differences, so the rows keep each request's tokens (the sampled
ones are appended here, by the worker itself) and its block table.

Invariant: num_computed_tokens <= num_tokens of every row; a row's number does not change while it is held. A
difference that does not fit what is held means that scheduler and worker have lost step: RuntimeError, which ends
the replica.
"""

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .forward_context import StepRows
from .messages import GrammarMasks, NewRequest, SchedulerOutput
from .sampler import SamplingBatch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step on the host. Rows stand in the order of their tokens; all int64.

    request_ids, row_index: [num_rows]
    token_ids, positions:   [num_tokens]
    sampling_rows:          [num_sampling] which of the step's rows sample
    last_token_index:       [num_sampling] where their last token stands among the step's tokens
    """

    request_ids: list[str]
    row_index: Ints
    token_ids: Ints
    positions: Ints
    rows: StepRows
    sampling_rows: Ints
    last_token_index: Ints


class InputBatch:
    """Rows of the running batch. See the module."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._device = device
        # Sampled tokens of steps in flight may pass the limit by one. Memory is touched only as far as it is used.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 2), dtype=np.int32)
        self._blocks = np.zeros((max_num_seqs, -(-(max_model_len + 2) // block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self._temperatures = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_ks = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_ps = np.ones(max_num_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._banned: dict[int, Ints] = {}
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs))
        # Constant parameters of the rows that sampled last, on the device; valid until rows change.
        self._cached_rows: Ints | None = None
        self._cached_parameters: tuple[torch.Tensor, ...] = ()

    @property
    def request_ids(self) -> list[str]:
        """Requests held, in the order in which they came."""
        return list(self._rows)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Drop removed rows, add new ones, extend running ones.

        Raises RuntimeError when the scheduler's view of a row is not ours.
        """
        for request_id in scheduler_output.removed_request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._banned.pop(row, None)
                heapq.heappush(self._free_rows, row)
        for new in scheduler_output.new_requests:
            self._add(new)
        for request_id, block_ids in scheduler_output.new_block_ids.items():
            self._extend(request_id, block_ids)
        rows = [self._row_of(request_id) for request_id in scheduler_output.num_scheduled_tokens]
        expected = np.array(scheduler_output.num_computed_tokens, dtype=np.int64)
        if len(expected) != len(rows) or (self._num_computed[rows] != expected).any():
            raise RuntimeError(
                f"the scheduler counts computed tokens as {scheduler_output.num_computed_tokens}, and they are "
                f"{self._num_computed[rows].tolist()} here"
            )

    def build_step(self, num_scheduled_tokens: dict[str, int]) -> StepInput:
        """Lay the step's tokens side by side. Raises RuntimeError when a row has not that many tokens."""
        request_ids = list(num_scheduled_tokens)
        row_index = np.array([self._row_of(request_id) for request_id in request_ids], dtype=np.int64)
        query_lens = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(request_ids))
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
            token_ids=self._token_ids[row_index[row_of_token], positions].astype(np.int64),
            positions=positions,
            rows=StepRows(
                query_lens=query_lens,
                kv_lens=kv_lens,
                block_tables=self._blocks[row_index, :max_blocks].astype(np.int64),
                block_size=self._block_size,
            ),
            sampling_rows=sampling_rows,
            last_token_index=(ends - 1)[sampling_rows],
        )

    def sampling_batch(self, step: StepInput, masks: GrammarMasks | None = None) -> SamplingBatch:
        """Parameters of the rows that sample in this step.

        masks: of those that have a grammar. Raises RuntimeError when one of them does not sample.
        """
        rows = step.row_index[step.sampling_rows]
        if self._cached_rows is None or not np.array_equal(rows, self._cached_rows):
            self._cached_parameters = tuple(
                torch.from_numpy(values[rows]).to(self._device)
                for values in (self._temperatures, self._top_ks, self._top_ps, self._seeds)
            )
            self._cached_rows = rows
        temperatures, top_ks, top_ps, seeds = self._cached_parameters
        num_outputs = self._num_tokens[rows] - self._num_prompt[rows]
        allowed = self._allowed_tokens(step, masks) if masks is not None else {}
        banned_row_index, banned_token_ids = self._banned_pairs(rows, num_outputs, allowed)
        is_random = self._temperatures[rows] > 0.0
        is_filtered = (self._top_ks[rows] > 0) | (self._top_ps[rows] < 1.0)
        return SamplingBatch(
            temperatures=temperatures,
            top_ks=top_ks,
            top_ps=top_ps,
            seeds=seeds,
            positions=torch.from_numpy(num_outputs).to(self._device),
            banned_row_index=banned_row_index,
            banned_token_ids=banned_token_ids,
            all_greedy=not is_random.any(),
            any_filtered=bool((is_random & is_filtered).any()),
            grammar_row_index=torch.tensor(list(allowed), device=self._device) if allowed else None,
            grammar_allowed=(
                torch.from_numpy(np.stack(list(allowed.values()))).to(self._device) if allowed else None
            ),
        )

    def finish_step(self, step: StepInput, sampled_token_ids: Ints) -> None:
        """Count the step's tokens as computed, and append what was sampled.

        sampled_token_ids: [num_sampling], in the order of `step.sampling_rows`
        """
        self._num_computed[step.row_index] = step.rows.kv_lens
        rows = step.row_index[step.sampling_rows]
        # A request whose last token came while this step was under way is at the limit; what it sampled is dropped.
        has_room = self._num_tokens[rows] < self._token_ids.shape[1]
        rows, sampled_token_ids = rows[has_room], sampled_token_ids[has_room]
        self._token_ids[rows, self._num_tokens[rows]] = sampled_token_ids
        self._num_tokens[rows] += 1

    def _add(self, new: NewRequest) -> None:
        if new.request_id in self._rows:
            raise RuntimeError(f"request {new.request_id} is new to the scheduler, and held here already")
        if not self._free_rows:
            raise RuntimeError(f"request {new.request_id} comes when all rows are taken")
        num_tokens, num_blocks = len(new.token_ids), len(new.block_ids)
        if num_tokens > self._token_ids.shape[1] or num_blocks > self._blocks.shape[1]:
            raise RuntimeError(f"request {new.request_id} with {num_tokens} tokens is longer than a row")
        row = heapq.heappop(self._free_rows)
        self._rows[new.request_id] = row
        self._token_ids[row, :num_tokens] = new.token_ids
        self._blocks[row, :num_blocks] = new.block_ids
        self._num_blocks[row] = num_blocks
        self._num_tokens[row] = num_tokens
        self._num_computed[row] = new.num_computed_tokens
        self._num_prompt[row] = new.num_prompt_tokens
        params = new.sampling_params
        self._temperatures[row] = params.temperature
        self._top_ks[row] = max(0, min(params.top_k, self._vocab_size))
        self._top_ps[row] = params.top_p
        self._seeds[row] = new.seed
        self._min_tokens[row] = params.min_tokens
        banned = sorted({token_id for token_id in new.stop_token_ids if 0 <= token_id < self._vocab_size})
        # To hold back every token would leave nothing to sample.
        if params.min_tokens > 0 and 0 < len(banned) < self._vocab_size:
            self._banned[row] = np.array(banned, dtype=np.int64)
        self._cached_rows = None

    def _extend(self, request_id: str, block_ids: list[int]) -> None:
        row = self._row_of(request_id)
        start = int(self._num_blocks[row])
        stop = start + len(block_ids)
        if stop > self._blocks.shape[1]:
            raise RuntimeError(f"request {request_id} with {stop} blocks is longer than a row")
        self._blocks[row, start:stop] = block_ids
        self._num_blocks[row] = stop

    def _row_of(self, request_id: str) -> int:
        row = self._rows.get(request_id)
        if row is None:
            raise RuntimeError(f"request {request_id} is scheduled, and not held here")
        return row

    def _allowed_tokens(self, step: StepInput, masks: GrammarMasks) -> dict[int, npt.NDArray[np.bool_]]:
        """Unpack masks: [vocab_size] for each row that has one, by its place among the rows that sample."""
        if not masks.request_ids:
            return {}
        places = {step.request_ids[row]: place for place, row in enumerate(step.sampling_rows.tolist())}
        words = np.frombuffer(masks.bits, dtype=np.uint8).reshape(len(masks.request_ids), -1)
        bits = np.unpackbits(words, axis=1, bitorder="little", count=self._vocab_size).astype(np.bool_)
        if not places.keys() >= set(masks.request_ids):
            raise RuntimeError(f"a grammar is given for requests that do not sample: {masks.request_ids}")
        return {places[request_id]: row for request_id, row in zip(masks.request_ids, bits, strict=True)}

    def _banned_pairs(
        self, rows: Ints, num_outputs: Ints, allowed: dict[int, npt.NDArray[np.bool_]]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self._banned:
            return None, None
        held = [
            (index, self._banned[row])
            for index, row in enumerate(rows.tolist())
            if row in self._banned
            and num_outputs[index] < self._min_tokens[row]
            # A grammar that has ended wins: to hold back end tokens, too, would leave nothing to sample.
            and (index not in allowed or _leaves_some(allowed[index], self._banned[row]))
        ]
        if not held:
            return None, None
        row_index = np.repeat([index for index, _ in held], [len(ids) for _, ids in held])
        token_ids = np.concatenate([ids for _, ids in held])
        return torch.from_numpy(row_index).to(self._device), torch.from_numpy(token_ids).to(self._device)


def _leaves_some(allowed: npt.NDArray[np.bool_], banned: Ints) -> bool:
    left = allowed.copy()
    left[banned] = False
    return bool(left.any())
