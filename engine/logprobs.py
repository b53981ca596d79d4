"""Log-probabilities as users see them: by token id, with the token's text, rank and bytes.

Called by: OutputProcessor, in the front end, for requests that asked. What an engine core has packed is read here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..workers.messages import LogprobTable
from .token_text import TokenTexts


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One token at one position.

    logprob:     or logit, as `model.logprobs_mode` says; -inf: it could not be
    rank:        1 + tokens that were more likely
    text:        what it adds to the text before it; empty as long as a character is not complete
    token_bytes: its own bytes
    is_special:  not text, as `skip_special_tokens` has it
    loses_space: the text begins with this token, and so without the space that `text` begins with
    """

    logprob: float
    rank: int
    text: str
    token_bytes: bytes
    is_special: bool = False
    loses_space: bool = False


PositionLogprobs = dict[int, Logprob]
"""The token that stands at a position first, then the likeliest ones, the best first."""


class LogprobReader:
    """Reads the tables of one sequence, in the order of its tokens.

    preceding:            token ids before the first one
    skips_special_tokens: they have no place in the text
    """

    def __init__(
        self, texts: TokenTexts, preceding: Sequence[int], *, skips_special_tokens: bool = True
    ) -> None:
        self._texts = texts
        self._skips_special_tokens = skips_special_tokens
        self._pending = texts.pending_after(preceding)
        self._is_at_start = not any(map(self._has_place, preceding))

    def read(self, table: LogprobTable) -> list[PositionLogprobs]:
        """Return one entry for each position."""
        token_ids = np.frombuffer(table.token_ids, dtype="<i4").reshape(-1, table.width)
        values = np.frombuffer(table.values, dtype="<f4").reshape(-1, table.width)
        ranks = np.frombuffer(table.ranks, dtype="<i4")
        return [
            self._read_position(ids, numbers, rank)
            for ids, numbers, rank in zip(token_ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
        ]

    def _read_position(self, token_ids: list[int], values: list[float], rank: int) -> PositionLogprobs:
        own, pending = token_ids[0], self._pending
        loses_space = self._is_at_start and self._texts.loses_space(own)
        found: PositionLogprobs = {own: self._entry(own, values[0], rank, loses_space=loses_space)}
        top_rank = 1
        for place in range(1, len(token_ids)):
            if place > 1 and values[place] < values[place - 1]:
                top_rank = place
            if token_ids[place] != own:
                found[token_ids[place]] = self._entry(token_ids[place], values[place], top_rank)
        _, self._pending = self._texts.add(pending, own)
        self._is_at_start = self._is_at_start and not self._has_place(own)
        return found

    def _has_place(self, token_id: int) -> bool:
        """Say whether a token is a part of the text."""
        if self._skips_special_tokens and self._texts.is_special(token_id):
            return False
        return bool(self._texts.bytes_of(token_id))

    def _entry(self, token_id: int, value: float, rank: int, *, loses_space: bool = False) -> Logprob:
        text, _ = self._texts.add(self._pending, token_id)
        return Logprob(
            logprob=value,
            rank=rank,
            text=text,
            token_bytes=self._texts.bytes_of(token_id),
            is_special=self._texts.is_special(token_id),
            loses_space=loses_space,
        )


def read_prompt(
    texts: TokenTexts,
    prompt_token_ids: Sequence[int],
    table: LogprobTable,
    *,
    skips_special_tokens: bool = True,
) -> list[PositionLogprobs | None]:
    """Return one entry for each prompt token; None for the first, which nothing comes before."""
    reader = LogprobReader(texts, prompt_token_ids[:1], skips_special_tokens=skips_special_tokens)
    return [None, *reader.read(table)]
