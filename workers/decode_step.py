"""DecodeStep: one step of rows with one new token each, from rows on the device to tokens on the device.

Called by: the model runner and forward_pass.py, by way of cuda_graphs.py. Everything it reads lies in persistent
tensors: the rows (device_rows.py) and one small buffer that the host fills for each step. It waits for nothing on the
host, so it can be recorded, and a step can be launched while the one before it still computes the tokens that this one
starts from.

    the host's buffer, for n rows and G KV cache groups     rows n | positions n | sample positions n | new blocks G * n
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .device_rows import DeviceRows
from .forward_context import ForwardContext
from .kernels.decode_inputs import DecodeInputs
from .layers.attention import LayerKVCache
from .models.causal_lm import CausalLM
from .upload import pinned_ints
from .vocab_columns import VocabShard

Ints = npt.NDArray[np.int64]

PrepareFunction = Callable[..., DecodeInputs]
"""`kernels.decode_inputs.make_decode_inputs`, or its Triton twin."""
DrawFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`kernels.triton_draw.draw_part`, or what does the same."""
BestRankFunction = Callable[..., torch.Tensor]
"""`kernels.triton_best_rank.best_rank`, or what does the same."""

NUM_LISTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """What a step made of its rows, and of padding.

    tokens: [size] int64, drawn plainly; of rows that want more than that they mean nothing
    hidden: [size, hidden_size], for whoever draws otherwise. Not the logits: each recording would keep its own
    """

    tokens: torch.Tensor
    hidden: torch.Tensor


class DecodeStep:
    """See the module.

    make_context: what the attention layers are told of the rows; must not wait for the device if this is recorded
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerKVCache],
        rows: DeviceRows,
        *,
        max_num_seqs: int,
        block_size: int,
        device: torch.device,
        make_context: Callable[[DecodeInputs], ForwardContext],
        prepare: PrepareFunction,
        draw: DrawFunction,
        best_rank: BestRankFunction,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._rows = rows
        self._block_size = block_size
        self._device = device
        self._make_context = make_context
        self._prepare = prepare
        self._draw = draw
        self._best_rank = best_rank
        head = model.head
        self._shard = VocabShard(head.group, head.span, head.vocab_size) if head.group.size > 1 else None
        self._num_groups = rows.block_tables.shape[0]
        self._inputs = torch.zeros(
            (NUM_LISTS + self._num_groups) * max_num_seqs, dtype=torch.int64, device=device
        )

    def load_padding(self, size: int) -> None:
        """Fill the buffer so that `compute(size)` reads and changes no row of a request."""
        nothing = np.zeros(0, dtype=np.int64)
        self.load(size, nothing, nothing, nothing, nothing.reshape(self._num_groups, 0))

    def load(self, size: int, rows: Ints, positions: Ints, sample_positions: Ints, new_blocks: Ints) -> None:
        """Send what the host knows of a step, padded to `size` rows; the copy is under way when this returns.

        rows, positions, sample_positions: [n], n at most `size`: row numbers, positions of their next tokens, and how
                                           many output tokens each has
        new_blocks:                        [num_kv_groups, n]; see `make_decode_inputs`
        """
        num_rows = len(rows)
        buffer = pinned_ints((NUM_LISTS + self._num_groups) * size, self._device)
        lists = buffer.numpy().reshape(-1, size)
        lists[0, :num_rows], lists[0, num_rows:] = rows, self._rows.padding_row
        lists[1, :num_rows], lists[1, num_rows:] = positions, -1
        lists[2, :num_rows], lists[2, num_rows:] = sample_positions, 0
        lists[NUM_LISTS:, :num_rows], lists[NUM_LISTS:, num_rows:] = new_blocks, -1
        self._inputs[: buffer.numel()].copy_(buffer, non_blocking=True)

    def compute(self, size: int) -> DecodeOutput:
        """Compute what was loaded for `size` rows. The tokens are noted in the rows as well."""
        lists = self._inputs[: (NUM_LISTS + self._num_groups) * size].view(-1, size)
        rows, positions, sample_positions = lists[0], lists[1], lists[2]
        state = self._rows
        inputs = self._prepare(
            rows,
            positions,
            lists[NUM_LISTS:],
            state.last_tokens,
            state.block_tables,
            block_size=self._block_size,
        )
        hidden = self._model(inputs.token_ids, inputs.positions, self._kv_caches, self._make_context(inputs))
        logits = self._model.compute_own_logits(hidden)
        first_id = 0
        if self._shard is not None:
            logits, first_id = self._shard.fill(logits), self._shard.first_id
        scores, tokens = self._draw(
            logits,
            rows,
            sample_positions,
            state.temperatures,
            state.seeds,
            state.vocab_limits,
            state.last_tokens,
            first_id=first_id,
        )
        if self._shard is not None:
            # Bits of both kinds of numbers: the exchange does not look into them.
            found = self._shard.gather(torch.stack([scores.view(torch.int64), tokens], dim=-1))
            tokens = self._best_rank(found, rows, state.last_tokens)
        return DecodeOutput(tokens=tokens, hidden=hidden)
