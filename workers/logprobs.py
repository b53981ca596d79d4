"""Log-probabilities of chosen tokens: gathered on the device, copied without waiting, packed for the engine.

Called by: sampler.py gathers, the model runner copies and packs. Where a row is spread over the ranks, its
normaliser, its ranks and its likeliest tokens are put together from what each rank has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from .logit_processors import LARGEST
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParts:
    """What one rank finds in its columns of m rows.

    largest:    [m] float32, the largest value; mass: [m] float64, sum of exp(value - largest)
    num_larger: [m] int64, values that exceed that of the row's own token
    values:     [m, k] float32, the k likeliest, the best first; token_ids: [m, k] int64
    """

    largest: torch.Tensor
    mass: torch.Tensor
    num_larger: torch.Tensor
    values: torch.Tensor
    token_ids: torch.Tensor


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
    parts = find_parts(rows, own, num_top, first_id=columns.first_id)
    return assemble(token_ids, own, parts, num_top, columns=columns, is_normalised=is_normalised)


def find_parts(rows: torch.Tensor, own: torch.Tensor, num_top: int, *, first_id: int = 0) -> RowParts:
    """Look at one rank's columns. rows: [m, width] float32; own: [m] float32, of the whole row's own token."""
    largest = rows.amax(dim=-1)
    # A rank may have nothing but -inf, and the difference of two of them is no number.
    distances = rows - largest.clamp(min=-LARGEST).unsqueeze(-1)
    values, places = _likeliest(rows, num_top)
    return RowParts(
        largest=largest,
        # The sum in float64, so that it does not depend on who adds up which part.
        mass=distances.exp().sum(dim=-1, dtype=torch.float64),
        num_larger=(rows > own.unsqueeze(-1)).sum(dim=-1),
        values=values,
        token_ids=places + first_id,
    )


def assemble(
    token_ids: torch.Tensor,
    own: torch.Tensor,
    parts: RowParts,
    num_top: int,
    *,
    columns: VocabColumns,
    is_normalised: bool,
) -> LogprobTensors:
    """Put together what the ranks have found. token_ids: [m] int64, each row's own token; own: [m] its value."""
    num_larger = sum_of(columns, parts.num_larger)
    values, ids = _best_of_all(parts, num_top, columns)
    values = torch.cat([own.unsqueeze(-1), values], dim=-1)
    if is_normalised:
        largest = max_of(columns, parts.largest).double()
        mass = sum_of(columns, parts.mass * (parts.largest.double() - largest).exp())
        values = (values.double() - largest.unsqueeze(-1) - mass.log().unsqueeze(-1)).float()
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


def _likeliest(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values, sorted, and their places: [m, at most count] float32 and int64."""
    # A whole row is faster to sort than to select; and a stable sort puts the lowest id first among equals.
    if count * 8 >= rows.shape[-1]:
        values, places = rows.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], places[:, :count]
    values, places = rows.topk(count, dim=-1)
    return values, places


def _best_of_all(parts: RowParts, count: int, columns: VocabColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of the whole rows: [m, count] float32 and int64, sorted."""
    if columns is WHOLE or count == 0:
        return parts.values, parts.token_ids
    # The ranks' ranges differ in width, and each must bring the same amount.
    missing = count - parts.values.shape[-1]
    values = columns.gather(F.pad(parts.values, (0, missing), value=-torch.inf))
    ids = columns.gather(F.pad(parts.token_ids, (0, missing)))
    order = values.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return values.gather(-1, order), ids.gather(-1, order)
