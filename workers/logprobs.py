"""Log-probabilities of chosen tokens: gathered on the device, copied without waiting, packed for the engine.

Called by: sampler.py gathers, the model runner copies and packs. Where a row is spread over the ranks, its
normaliser, its ranks and its likeliest tokens are put together from what each rank has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from .messages import LogprobTable
from .sampling_batch import LogprobGroup
from .vocab_columns import WHOLE, VocabColumns, max_of, sum_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTensors:
    """Numbers of m rows.

    token_ids: [m, 1 + k] int32, the row's own token, then the k likeliest, the best first
    values:    [m, 1 + k] float32
    ranks:     [m] int32, of the own token: 1 + tokens with a strictly larger value
    """

    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor


def gather_logprobs(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    *,
    columns: VocabColumns = WHOLE,
    is_normalised: bool = True,
) -> LogprobTensors:
    """Take the numbers of one token of each row, and of the likeliest ones.

    rows: [m, width] float32 logits; token_ids: [m] int64; is_normalised: log-probabilities, otherwise logits
    """
    width = rows.shape[-1]
    places = token_ids - columns.first_id
    is_here = (places >= 0) & (places < width)
    own = rows.gather(-1, places.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    own = max_of(columns, torch.where(is_here, own, -torch.inf))
    num_larger = sum_of(columns, (rows > own.unsqueeze(-1)).sum(dim=-1))
    values, ids = _likeliest(rows, num_top, columns)
    values = torch.cat([own.unsqueeze(-1), values], dim=-1)
    if is_normalised:
        largest = max_of(columns, rows.amax(dim=-1)).unsqueeze(-1)
        # The sum in float64, so that it does not depend on who adds up which part.
        mass = sum_of(columns, (rows - largest).exp().sum(dim=-1, dtype=torch.float64)).unsqueeze(-1)
        values = (values.double() - largest.double() - mass.log()).float()
    return LogprobTensors(
        token_ids=torch.cat([token_ids.unsqueeze(-1), ids], dim=-1).int(),
        values=values,
        ranks=(1 + num_larger).int(),
    )


class HostCopy:
    """Tensors on their way to the host. The device goes on; `wait` blocks until they are there."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if any(tensor.is_cuda for tensor in tensors):
            # Only a copy into pinned memory is asynchronous.
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_done(self) -> bool:
        """True when `wait` returns at once."""
        return self._event is None or self._event.query()

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors on the host, in their order."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class StepCopy:
    """Sampled tokens and log-probabilities of a step on their way to the host."""

    def __init__(
        self, token_ids: torch.Tensor, groups: Sequence[LogprobGroup], tables: Sequence[LogprobTensors]
    ) -> None:
        self._groups = groups
        parts = [part for table in tables for part in (table.token_ids, table.values, table.ranks)]
        self._copy = HostCopy([token_ids, *parts])

    @property
    def is_done(self) -> bool:
        """True when `wait` returns at once."""
        return self._copy.is_done

    def wait(self) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], dict[int, LogprobTable]]:
        """Return the tokens, [rows] int64, and the log-probabilities by row."""
        token_ids, *parts = [tensor.numpy() for tensor in self._copy.wait()]
        tables = {}
        for index, group in enumerate(self._groups):
            ids, values, ranks = parts[3 * index : 3 * index + 3]
            for at, (place, num_top) in enumerate(zip(group.places, group.wanted, strict=True)):
                tables[place] = pack_table(
                    ids[at : at + 1, : 1 + num_top], values[at : at + 1, : 1 + num_top], ranks[at : at + 1]
                )
        return token_ids, tables


def pack_table(
    token_ids: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    values: np.ndarray[tuple[int, int], np.dtype[np.float32]],
    ranks: np.ndarray[tuple[int], np.dtype[np.int32]],
) -> LogprobTable:
    """Pack some positions of one request. token_ids, values: [positions, width]; ranks: [positions]."""
    return LogprobTable(
        width=token_ids.shape[1],
        token_ids=token_ids.astype("<i4").tobytes(),
        values=values.astype("<f4").tobytes(),
        ranks=ranks.astype("<i4").tobytes(),
    )


def _likeliest(rows: torch.Tensor, count: int, columns: VocabColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values of the whole rows and their token ids: [m, count] float32 and int64, sorted."""
    width = rows.shape[-1]
    if count == 0:
        empty = rows.new_empty((rows.shape[0], 0))
        return empty, empty.long()
    # A whole row is faster to sort than to select; and a stable sort puts the lowest id first among equals.
    if count * 8 >= width:
        values, places = rows.sort(dim=-1, descending=True, stable=True)
        values, places = values[:, :count], places[:, :count]
    else:
        values, places = rows.topk(count, dim=-1)
    ids = places + columns.first_id
    if columns is WHOLE:
        return values, ids
    missing = count - values.shape[-1]
    values = columns.gather(F.pad(values, (0, missing), value=-torch.inf))
    ids = columns.gather(F.pad(ids, (0, missing)))
    order = values.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return values.gather(-1, order), ids.gather(-1, order)
