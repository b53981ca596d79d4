"""What requests hold so far, on the device: counts for penalties, last tokens for bad words.

Called by: sampling_rows.py. Only rows that need it take a slot. A slot is filled once, from the tokens of a new or
resumed request, and then grows by each sampled token where that was sampled: no step waits for the host, and nothing
is counted twice.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .logit_processors import pack_masks
from .upload import upload_one

Ints = npt.NDArray[np.int64]

NO_TOKEN = -1
FIRST_SLOTS = 4


class Slots:
    """Numbers 0, 1, ... given to rows, the smallest free one first; few are ever in use at once.

    capacity: numbers given out so far, free ones included
    """

    def __init__(self) -> None:
        self._of_row: dict[int, int] = {}
        self._free: list[int] = []
        self.capacity = 0

    def __len__(self) -> int:
        return len(self._of_row)

    def take(self, row: int) -> int:
        """Give `row` a slot."""
        if not self._free:
            self._free = [self.capacity]
            self.capacity += 1
        slot = self._free.pop(self._free.index(min(self._free)))
        self._of_row[row] = slot
        return slot

    def give_back(self, row: int) -> None:
        """Free the slot of `row`, if it has one."""
        slot = self._of_row.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def find(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return which entries of `rows` have a slot, and their slots."""
        places = [place for place, row in enumerate(rows) if row in self._of_row]
        return places, [self._of_row[rows[place]] for place in places]


class TokenCounts:
    """Which tokens prompt and output hold, and how often the output holds each.

    held: [slots, num_words] int32, bit j of word i for token 32 * i + j; counts: [slots, vocab_size] int32
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.slots = Slots()
        self._vocab_size = vocab_size
        self._device = device
        self.held = torch.zeros((0, -(-vocab_size // 32)), dtype=torch.int32, device=device)
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def add(self, row: int, prompt_token_ids: Ints, output_token_ids: Ints) -> None:
        """Fill a slot for a row that comes, or comes back."""
        slot = self.slots.take(row)
        self.held = grow(self.held, self.slots.capacity, 0)
        self.counts = grow(self.counts, self.slots.capacity, 0)
        is_held = np.zeros(self._vocab_size, dtype=np.bool_)
        is_held[prompt_token_ids] = True
        is_held[output_token_ids] = True
        self.held[slot] = upload_one(pack_masks(is_held), self._device)
        token_ids, counts = np.unique(output_token_ids, return_counts=True)
        self.counts[slot].zero_()
        places = upload_one(token_ids, self._device)
        self.counts[slot, places] = upload_one(counts.astype(np.int32), self._device)

    def append(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one token of each. slots, token_ids: [m] int64 on the device, no slot twice."""
        ones = torch.ones_like(slots, dtype=torch.int32)
        self.counts.index_put_((slots, token_ids), ones, accumulate=True)
        places = (slots, token_ids >> 5)
        bits = (torch.ones_like(token_ids) << (token_ids & 31)).int()
        self.held.index_put_(places, self.held[places] | bits)


class LastTokens:
    """The last output tokens of each row, as many as the longest beginning of a bad word.

    tokens: [slots, length] int64, the newest at the right; NO_TOKEN where there is none yet
    """

    def __init__(self, device: torch.device) -> None:
        self.slots = Slots()
        self._device = device
        self.tokens = torch.full((0, 0), NO_TOKEN, dtype=torch.int64, device=device)

    @property
    def length(self) -> int:
        """Tokens kept of each row."""
        return self.tokens.shape[1]

    def add(self, row: int, output_token_ids: Ints, length: int) -> None:
        """Fill a slot for a row that comes, or comes back. length: tokens that it needs."""
        if length > self.length and len(self.slots):
            # What is further back than the older rows need matters to none of them.
            missing = length - self.length
            self.tokens = torch.nn.functional.pad(self.tokens, (missing, 0), value=NO_TOKEN)
        elif length > self.length:
            self.tokens = self.tokens.new_full((self.tokens.shape[0], length), NO_TOKEN)
        slot = self.slots.take(row)
        self.tokens = grow(self.tokens, self.slots.capacity, NO_TOKEN)
        self.tokens[slot].fill_(NO_TOKEN)
        count = min(self.length, len(output_token_ids))
        if count:
            last = upload_one(output_token_ids[-count:].astype(np.int64), self._device)
            self.tokens[slot, self.length - count :] = last

    def append(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Push one token of each. slots, token_ids: [m] int64 on the device, no slot twice."""
        if self.length:
            old = self.tokens.index_select(0, slots)
            self.tokens.index_copy_(0, slots, torch.cat([old[:, 1:], token_ids.unsqueeze(-1)], dim=-1))


def grow(x: torch.Tensor, capacity: int, value: int) -> torch.Tensor:
    """Give `x` at least `capacity` rows, doubling; new ones hold `value`."""
    if x.shape[0] >= capacity:
        return x
    rows = max(FIRST_SLOTS, capacity, 2 * x.shape[0])
    return torch.cat([x, x.new_full((rows - x.shape[0], *x.shape[1:]), value)])
