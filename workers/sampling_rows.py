"""SamplingRows: the sampling parameters of the requests that a rank holds, row by row, on the device.

Called by: InputBatch tells of rows that come and go, and asks for the `SamplingBatch` of a step; the model runner
hands over what was sampled. One owner, one thread. The tensors are written where rows change and nowhere else; while
the same rows sample step after step, a step costs the upload of their positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .config import LogprobsMode
from .logit_processors import LARGEST, pack_masks
from .messages import NewRequest
from .sampling_batch import LogprobGroup, Penalties, SamplingBatch, TokenMasks, TokenValues
from .sampling_params import SamplingParams
from .token_history import Ints, LastTokens, Slots, TokenCounts, grow
from .upload import upload_one

MAX_BIAS = 100.0
MAX_GATHERED = 256
"""Likeliest tokens that ranks exchange for a row; beyond it they exchange the rows themselves."""

TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(6)
SEED, TOP_K, VOCAB_LIMIT = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarWords:
    """Masks of a step. places: which of the rows that sample; words: [m, num_words] int32, as in `GrammarMasks`."""

    places: list[int]
    words: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """What depends on which rows sample, and not on the step."""

    rows: Ints
    floats: torch.Tensor
    ints: torch.Tensor
    any_filtered: bool
    any_min_p: bool
    max_top_k: int
    has_open_nucleus: bool
    min_vocab_limit: int
    allowed: TokenMasks | None
    bias: TokenValues | None
    penalty_rows: tuple[torch.Tensor, torch.Tensor] | None
    word_rows: tuple[torch.Tensor, torch.Tensor] | None
    words: "_Words | None"
    logprobs: tuple[LogprobGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """Bad words of the rows that sample.

    row_index: [m]; place, slots, last: [n] int64, each word's row, its slot, its last token
    beginnings: [n, length] int64, aligned at the right; -1: any token
    """

    row_index: torch.Tensor
    place: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    beginnings: torch.Tensor


class SamplingRows:
    """See the module."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._logprobs_mode = logprobs_mode
        self._floats = np.zeros((max_num_seqs, 6), dtype=np.float32)
        self._ints = np.zeros((max_num_seqs, 3), dtype=np.int64)
        self._device_floats = torch.zeros((max_num_seqs, 6), dtype=torch.float32, device=device)
        self._device_ints = torch.zeros((max_num_seqs, 3), dtype=torch.int64, device=device)
        self._params: dict[int, SamplingParams] = {}
        self._held_back: dict[int, Ints] = {}
        self._changed: set[int] = set()
        self._counts = TokenCounts(vocab_size, device)
        self._last_tokens = LastTokens(device)
        self._allowed_slots = Slots()
        self._allowed = torch.zeros((0, -(-vocab_size // 32)), dtype=torch.int32, device=device)
        self._selection: _Selection | None = None

    def add(self, row: int, new: NewRequest) -> None:
        """Take over a request. Its counts are made from its tokens, also those of an earlier life."""
        params = new.sampling_params
        self._params[row] = params
        vocab_limit = self._vocab_size if new.vocab_limit is None else min(new.vocab_limit, self._vocab_size)
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self._floats[row] = (
            params.temperature,
            params.top_p,
            params.min_p,
            min(max(params.repetition_penalty, 1 / LARGEST), LARGEST),
            params.frequency_penalty,
            params.presence_penalty,
        )
        self._ints[row] = (new.seed, top_k, vocab_limit)
        self._changed.add(row)
        self._selection = None
        output = np.array(new.token_ids[new.num_prompt_tokens :], dtype=np.int64)
        if has_penalty(params):
            prompt = np.array(new.token_ids[: new.num_prompt_tokens], dtype=np.int64)
            self._counts.add(row, prompt, output)
        if params.bad_words_token_ids:
            length = max(len(word) - 1 for word in params.bad_words_token_ids)
            self._last_tokens.add(row, output, length)
        if params.allowed_token_ids is not None:
            slot = self._allowed_slots.take(row)
            self._allowed = grow(self._allowed, self._allowed_slots.capacity, 0)
            allowed = np.zeros(self._vocab_size, dtype=np.bool_)
            allowed[list(params.allowed_token_ids)] = True
            self._allowed[slot] = upload_one(pack_masks(allowed), self._device)
        if params.min_tokens > 0 and new.stop_token_ids:
            ids = sorted({token_id for token_id in new.stop_token_ids if 0 <= token_id < self._vocab_size})
            self._held_back[row] = np.array(ids, dtype=np.int64)

    def remove(self, row: int) -> None:
        """Forget a request."""
        del self._params[row]
        self._held_back.pop(row, None)
        self._counts.slots.give_back(row)
        self._last_tokens.slots.give_back(row)
        self._allowed_slots.give_back(row)
        self._selection = None

    def batch(self, rows: Ints, num_outputs: Ints, grammar: GrammarWords | None = None) -> SamplingBatch:
        """Describe one step. rows, num_outputs: [n], the rows that sample and the output tokens they have."""
        selection = self._selected(rows)
        floats, ints = selection.floats, selection.ints
        masks = None
        if grammar is not None and grammar.places:
            masks = TokenMasks(
                row_index=self._index(grammar.places), words=upload_one(grammar.words, self._device)
            )
        return SamplingBatch(
            temperatures=floats[:, TEMPERATURE],
            top_ps=floats[:, TOP_P],
            min_ps=floats[:, MIN_P],
            top_ks=ints[:, TOP_K],
            seeds=ints[:, SEED],
            positions=self._index(num_outputs),
            all_greedy=not (self._floats[rows, TEMPERATURE] > 0.0).any(),
            any_filtered=selection.any_filtered,
            any_min_p=selection.any_min_p,
            max_top_k=selection.max_top_k,
            has_open_nucleus=selection.has_open_nucleus,
            vocab_limits=ints[:, VOCAB_LIMIT],
            min_vocab_limit=selection.min_vocab_limit,
            grammar=masks,
            allowed=selection.allowed,
            bad_words=self._bad_words(selection.words),
            bias=selection.bias,
            held_back=self._hold_back(rows, num_outputs),
            penalties=self._penalties(selection),
            logprobs=selection.logprobs,
            logprobs_mode=self._logprobs_mode,
        )

    def needs_whole_rows(self, rows: Ints) -> bool:
        """True when the rows that sample cannot be sampled in parts, or it would not pay: a nucleus without top-k
        (any number of tokens may belong to it), and more than MAX_GATHERED tokens of each rank.
        """
        selection = self._selected(rows)
        num_top = max((group.num_top for group in selection.logprobs), default=0)
        return selection.has_open_nucleus or max(selection.max_top_k, num_top) > MAX_GATHERED

    def append(self, token_ids: torch.Tensor) -> None:
        """Take over what the last batch sampled. token_ids: [n] int64 on the device, in the order of its rows."""
        selection = self._selection
        assert selection is not None, "batch() comes first"
        if selection.penalty_rows is not None:
            row_index, slots = selection.penalty_rows
            self._counts.append(slots, token_ids.index_select(0, row_index))
        if selection.word_rows is not None:
            row_index, slots = selection.word_rows
            self._last_tokens.append(slots, token_ids.index_select(0, row_index))

    def _selected(self, rows: Ints) -> _Selection:
        if self._selection is None or not np.array_equal(rows, self._selection.rows):
            self._selection = self._select(rows)
        return self._selection

    def _select(self, rows: Ints) -> _Selection:
        if self._changed:
            changed = sorted(self._changed)
            index = self._index(changed)
            self._device_floats.index_copy_(0, index, upload_one(self._floats[changed], self._device))
            self._device_ints.index_copy_(0, index, upload_one(self._ints[changed], self._device))
            self._changed.clear()
        listed = rows.tolist()
        index = self._index(rows)
        is_random = self._floats[rows, TEMPERATURE] > 0.0
        has_top_k = is_random & (self._ints[rows, TOP_K] > 0)
        has_top_p = is_random & (self._floats[rows, TOP_P] < 1.0)
        allowed_places, allowed_slots = self._allowed_slots.find(listed)
        return _Selection(
            rows=rows,
            floats=self._device_floats.index_select(0, index),
            ints=self._device_ints.index_select(0, index),
            any_filtered=bool((has_top_k | has_top_p).any()),
            any_min_p=bool((is_random & (self._floats[rows, MIN_P] > 0.0)).any()),
            max_top_k=int(self._ints[rows, TOP_K][has_top_k].max(initial=0)),
            has_open_nucleus=bool((has_top_p & ~has_top_k).any()),
            min_vocab_limit=int(self._ints[rows, VOCAB_LIMIT].min()),
            allowed=(
                TokenMasks(
                    row_index=self._index(allowed_places),
                    words=self._allowed.index_select(0, self._index(allowed_slots)),
                )
                if allowed_places
                else None
            ),
            bias=self._bias(listed),
            penalty_rows=self._slot_rows(self._counts.slots, listed),
            word_rows=self._slot_rows(self._last_tokens.slots, listed),
            words=self._words(listed),
            logprobs=self._logprob_groups(listed),
        )

    def _slot_rows(self, slots: Slots, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        places, found = slots.find(rows)
        return (self._index(places), self._index(found)) if places else None

    def _penalties(self, selection: _Selection) -> Penalties | None:
        if selection.penalty_rows is None:
            return None
        row_index, slots = selection.penalty_rows
        values = selection.floats.index_select(0, row_index)
        return Penalties(
            row_index=row_index,
            slots=slots,
            repetition=values[:, REPETITION : REPETITION + 1],
            frequency=values[:, FREQUENCY : FREQUENCY + 1],
            presence=values[:, PRESENCE : PRESENCE + 1],
            held=self._counts.held,
            counts=self._counts.counts,
        )

    def _bias(self, rows: Sequence[int]) -> TokenValues | None:
        biased = [(place, self._params[row].logit_bias) for place, row in enumerate(rows)]
        return self._values(
            [
                (place, list(bias), [min(max(value, -MAX_BIAS), MAX_BIAS) for value in bias.values()])
                for place, bias in biased
                if bias
            ]
        )

    def _hold_back(self, rows: Ints, num_outputs: Ints) -> TokenValues | None:
        if not self._held_back:
            return None
        return self._values(
            [
                (place, ids.tolist(), [-np.inf] * len(ids))
                for place, row in enumerate(rows.tolist())
                if (ids := self._held_back.get(row)) is not None
                and num_outputs[place] < self._params[row].min_tokens
            ]
        )

    def _values(self, entries: Sequence[tuple[int, list[int], list[float]]]) -> TokenValues | None:
        if not entries:
            return None
        lengths = [len(ids) for _, ids, _ in entries]
        values = np.concatenate([np.array(values, dtype=np.float32) for _, _, values in entries])
        return TokenValues(
            row_index=self._index([place for place, _, _ in entries]),
            place=self._index(np.repeat(np.arange(len(entries)), lengths)),
            token_ids=self._index(np.concatenate([ids for _, ids, _ in entries])),
            values=upload_one(values, self._device),
        )

    def _words(self, rows: Sequence[int]) -> _Words | None:
        places, slots = self._last_tokens.slots.find(rows)
        if not places:
            return None
        length = self._last_tokens.length
        index, slot_of_word, last, beginnings = [], [], [], []
        for at, (place, slot) in enumerate(zip(places, slots, strict=True)):
            for word in self._params[rows[place]].bad_words_token_ids:
                index.append(at)
                slot_of_word.append(slot)
                last.append(word[-1])
                beginnings.append([-1] * (length - len(word) + 1) + list(word[:-1]))
        return _Words(
            row_index=self._index(places),
            place=self._index(index),
            slots=self._index(slot_of_word),
            last=self._index(last),
            beginnings=self._index(np.array(beginnings, dtype=np.int64).reshape(len(last), length)),
        )

    def _bad_words(self, words: _Words | None) -> TokenValues | None:
        if words is None:
            return None
        tokens = self._last_tokens.tokens.index_select(0, words.slots)
        begins = ((tokens == words.beginnings) | (words.beginnings < 0)).all(dim=-1)
        return TokenValues(
            row_index=words.row_index,
            place=words.place,
            token_ids=words.last,
            values=torch.where(begins, -torch.inf, 0.0),
        )

    def _logprob_groups(self, rows: Sequence[int]) -> tuple[LogprobGroup, ...]:
        """Rows that want the whole vocabulary stand apart: the others must not pay for them."""
        wanted = [(place, self._params[row].logprobs) for place, row in enumerate(rows)]
        few = [
            (place, min(count, self._vocab_size))
            for place, count in wanted
            if count is not None and count >= 0
        ]
        whole = [(place, self._vocab_size) for place, count in wanted if count == -1]
        return tuple(
            LogprobGroup(
                row_index=self._index([place for place, _ in group]),
                places=[place for place, _ in group],
                num_top=max(count for _, count in group),
                wanted=[count for _, count in group],
            )
            for group in (few, whole)
            if group
        )

    def _index(self, values: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        return upload_one(np.asarray(values, dtype=np.int64), self._device)


def is_plain(params: SamplingParams) -> bool:
    """True when a token is the likeliest one, or drawn at a temperature from all: nothing else is asked for."""
    has_filter = params.temperature > 0.0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
    return not (
        has_filter
        or has_penalty(params)
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.min_tokens > 0
        or params.logprobs is not None
        or params.structured_outputs is not None
    )


def has_penalty(params: SamplingParams) -> bool:
    """True when the tokens so far matter to the next one's logits."""
    return (
        params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    )
