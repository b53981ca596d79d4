"""PromptStep: the model's pass over a step that holds prompts, from one buffer of the host to what is sampled from.

Called by: forward_pass.py, by way of cuda_graphs.py, in a worker process. As DecodeStep it reads nothing but persistent
tensors, the rows (device_rows.py) and a buffer that the host fills for each step, so it can be recorded: one by one the
kernels of such a step take the host longer than a GPU needs for a few hundred tokens. What follows it, the choice of
tokens, is launched for each step as it needs it.

A recording is of so many tokens, and has room for so many decoding rows and so many prompts; the rest is padding.

    the host's buffer, for n tokens, G KV cache groups and r rows of which p are prompts
    ids n | positions n | rows of the tokens n | slots G * n
    rows r | lengths r | tokens that are sampled from r | where prompts begin p + 1
"""

from collections.abc import Sequence

import numpy as np
import torch

from .device_rows import DeviceRows
from .forward_context import ForwardContext, slot_mapping
from .layers.attention import LayerKVCache
from .models.causal_lm import CausalLM
from .paged_rows import PagedRows
from .step_input import ON_DEVICE, Ints, StepInput
from .upload import pinned_ints

TOKENS_PER_PROMPT = 8
"""A recording has room for one prompt in so many tokens."""
NUM_TOKEN_LISTS, NUM_ROW_LISTS = 3, 3


class PromptStep:
    """See the module.

    windows:    of the KV cache groups
    max_tokens: of the largest recording
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerKVCache],
        rows: DeviceRows,
        *,
        windows: Sequence[int | None],
        max_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._rows = rows
        self._windows = windows
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._device = device
        self._num_groups = rows.block_tables.shape[0]
        self._buffer = torch.zeros(self._parts(max_tokens)[-1], dtype=torch.int64, device=device)

    @staticmethod
    def size_needed(num_tokens: int, num_prompts: int) -> int:
        """Tokens that a recording must have for a step of so many tokens, of so many prompts among others."""
        return max(num_tokens, TOKENS_PER_PROMPT * num_prompts)

    def load_padding(self, size: int) -> None:
        """Fill the buffer so that `compute(size)` reads and changes no row of a request."""
        buffer, *_ = self._padding(size)
        self._send(buffer)

    def load(self, size: int, step: StepInput) -> None:
        """Send a step, padded to `size` tokens; the copy is under way when this returns.

        size: at least `size_needed` of the step, whose rows of one new token stand first
        """
        query_lens = step.rows.query_lens
        num_tokens = len(step.token_ids)
        num_decode = int((query_lens == 1).sum())
        num_prompts = len(query_lens) - num_decode
        buffer, tokens, rows, starts = self._padding(size)
        tokens[0, :num_tokens] = step.token_ids
        tokens[1, :num_tokens] = step.positions
        tokens[2, :num_tokens] = step.row_index[step.row_of_token]
        tokens[NUM_TOKEN_LISTS:, :num_tokens] = slot_mapping(step.rows)
        first_prompt = self._num_decode_rows(size)
        for of_all, numbers in zip(rows[:2], (step.row_index, step.rows.kv_lens), strict=True):
            of_all[:num_decode] = numbers[:num_decode]
            of_all[first_prompt : first_prompt + num_prompts] = numbers[num_decode:]
        rows[2, : len(step.last_token_index)] = step.last_token_index
        starts[0] = num_decode
        starts[1 : 1 + num_prompts] = num_decode + np.cumsum(query_lens[num_decode:])
        starts[1 + num_prompts :] = num_tokens
        self._rows.send_blocks()
        self._send(buffer)

    def compute(self, size: int) -> torch.Tensor:
        """Compute what was loaded: hidden states [at most size, hidden_size], those that are sampled from first."""
        end_tokens, end_rows, end = self._parts(size)
        ids, positions, row_of_token, *slots = self._buffer[:end_tokens].view(-1, size).unbind(0)
        row_index, kv_lens, kept = self._buffer[end_tokens:end_rows].view(NUM_ROW_LISTS, -1).unbind(0)
        token_ids = torch.where(ids == ON_DEVICE, self._rows.last_tokens.index_select(0, row_of_token), ids)
        context = ForwardContext(
            windows=self._windows,
            slot_mappings=slots,
            rows=PagedRows(
                num_rows=row_index.shape[0],
                num_decode_rows=self._num_decode_rows(size),
                prompt_starts=self._buffer[end_rows:end].int(),
                kv_lens=kv_lens.int(),
                block_tables=self._rows.block_tables.index_select(1, row_index).unbind(0),
                max_query_len=min(size, self._max_model_len),
                max_kv_len=self._max_model_len,
            ),
        )
        hidden: torch.Tensor = self._model(token_ids, positions, self._kv_caches, context, kept[:size])
        return hidden

    def _num_decode_rows(self, size: int) -> int:
        return min(size, self._max_num_seqs)

    def _num_prompts(self, size: int) -> int:
        return min(size // TOKENS_PER_PROMPT, self._max_num_seqs)

    def _parts(self, size: int) -> tuple[int, int, int]:
        """Where the lists of tokens end in the buffer, those of rows, and where prompts begin."""
        end_tokens = (NUM_TOKEN_LISTS + self._num_groups) * size
        end_rows = end_tokens + NUM_ROW_LISTS * (self._num_decode_rows(size) + self._num_prompts(size))
        return end_tokens, end_rows, end_rows + self._num_prompts(size) + 1

    def _padding(self, size: int) -> tuple[torch.Tensor, Ints, Ints, Ints]:
        """Return a buffer of the host with nothing but padding, and its three parts."""
        end_tokens, end_rows, end = self._parts(size)
        buffer = pinned_ints(end, self._device)
        numbers = buffer.numpy()
        tokens = numbers[:end_tokens].reshape(-1, size)
        rows, starts = numbers[end_tokens:end_rows].reshape(NUM_ROW_LISTS, -1), numbers[end_rows:]
        padding_row = self._rows.padding_row
        tokens[0], tokens[1], tokens[2], tokens[NUM_TOKEN_LISTS:] = 0, 0, padding_row, -1
        rows[0], rows[1:] = padding_row, 0
        starts[:] = 0
        return buffer, tokens, rows, starts

    def _send(self, buffer: torch.Tensor) -> None:
        self._buffer[: buffer.numel()].copy_(buffer, non_blocking=True)
