"""DeviceRows: what the device itself must hold of each row, so that a step can begin before the one ahead is back.

Called by: the model runner. One owner, one thread. A step that is planned while another runs does not know the tokens
that the other samples; they stay here, and the next step reads them here. Block tables grow where they are used, by
what the host sends of them: a few numbers a step.

Row number `padding_row` belongs to no request: CUDA graphs compute it where a batch has fewer rows than the graph.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .upload import upload

Ints = npt.NDArray[np.int64]


class DeviceRows:
    """Tensors by row of the InputBatch. max_blocks: entries of a row's block table in each KV cache group.

    last_tokens:  [rows + 1] int64, what was sampled last
    block_tables: [num_kv_groups, rows + 1, max_blocks] int32
    temperatures: [rows + 1] float32; 0: greedy
    seeds:        [rows + 1] int64
    vocab_limits: [rows + 1] int64, first token id that must not be drawn
    """

    def __init__(
        self, *, max_num_seqs: int, num_kv_groups: int, max_blocks: int, device: torch.device
    ) -> None:
        self.padding_row = max_num_seqs
        self.max_blocks = max_blocks
        self._device = device
        rows = max_num_seqs + 1
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((num_kv_groups, rows, max_blocks), dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.vocab_limits = torch.zeros(rows, dtype=torch.int64, device=device)
        # A row of padding that may draw nothing would be looked through to its end for what it may draw.
        self.vocab_limits[self.padding_row] = 1
        # Blocks that the host knows of and the device does not: flat places in block_tables, and ids.
        self._places: list[Ints] = []
        self._block_ids: list[Ints] = []

    @property
    def has_unsent_blocks(self) -> bool:
        """True when `send_blocks` would write something."""
        return bool(self._places)

    def set_sampling(
        self,
        rows: Sequence[int],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        vocab_limits: Sequence[int],
    ) -> None:
        """Take over new requests: parallel lists."""
        if not rows:
            return
        # Seeds may use all 64 bits, and temperatures travel as their own bits.
        bits = np.array(temperatures, dtype=np.float32).view(np.int32).astype(np.int64)
        index, floats, ints, limits = upload(
            [np.array(values, dtype=np.int64) for values in (rows, bits, seeds, vocab_limits)], self._device
        )
        self.temperatures.index_copy_(0, index, floats.int().view(torch.float32))
        self.seeds.index_copy_(0, index, ints)
        self.vocab_limits.index_copy_(0, index, limits)

    def add_blocks(self, row: int, first: int, block_ids: Ints) -> None:
        """Note blocks of a row from entry `first` on: [num_kv_groups, n]. They reach the device with `send_blocks`."""
        num_groups, num_rows, max_blocks = self.block_tables.shape
        groups = np.arange(num_groups)[:, None]
        entries = first + np.arange(block_ids.shape[1])
        self._places.append(((groups * num_rows + row) * max_blocks + entries).reshape(-1))
        self._block_ids.append(block_ids.reshape(-1))

    def take_decode_blocks(self, rows: Ints, entries: Ints) -> Ints | None:
        """Take the unsent blocks when each is the entry that its row writes its next token to.

        rows, entries: [n], of a step in which each row has one new token
        Returns [num_kv_groups, n], -1 where nothing is new; None, and nothing is taken, when other blocks are unsent.
        """
        num_groups, num_rows, max_blocks = self.block_tables.shape
        taken = np.full(num_groups * len(rows), -1, dtype=np.int64)
        if self._places:
            places, ids = np.concatenate(self._places), np.concatenate(self._block_ids)
            wanted = ((np.arange(num_groups)[:, None] * num_rows + rows) * max_blocks + entries).reshape(-1)
            order = np.argsort(wanted)
            found = order[np.minimum(np.searchsorted(wanted, places, sorter=order), len(wanted) - 1)]
            if (wanted[found] != places).any():
                return None
            taken[found] = ids
            self._places.clear()
            self._block_ids.clear()
        return taken.reshape(num_groups, len(rows))

    def send_blocks(self) -> None:
        """Write the unsent blocks. A place that was noted twice gets the later block."""
        if not self.has_unsent_blocks:
            return
        latest = dict(
            zip(np.concatenate(self._places).tolist(), np.concatenate(self._block_ids).tolist(), strict=True)
        )
        places, ids = upload(
            [
                np.fromiter(values, dtype=np.int64, count=len(latest))
                for values in (latest.keys(), latest.values())
            ],
            self._device,
        )
        self.block_tables.view(-1).index_copy_(0, places, ids.int())
        self._places.clear()
        self._block_ids.clear()
