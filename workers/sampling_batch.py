"""SamplingBatch: the rows that sample in one step, and what is done to their logits.

Called by: sampling_rows.py builds it, logit_processors.py and sampler.py read it. What no row of a step asks for is
None, so that nothing is spent on it. Tensors stand on the logits' device. `row_index` always counts the rows of the
step's logits, each at most once.
"""

from dataclasses import dataclass

import torch

from .config import LogprobsMode


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """Tokens that some rows may choose.

    row_index: [m] int64; words: [m, num_words] int32, bit j of word i for token 32 * i + j
    """

    row_index: torch.Tensor
    words: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """What is added to single logits of some rows; -inf bans a token.

    row_index: [m] int64
    place:     [n] int64, which entry of row_index; token_ids: [n] int64; values: [n] float32
    """

    row_index: torch.Tensor
    place: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Rows that have a penalty, and what their requests hold so far.

    row_index, slots:                [m] int64; slots: of the two tables below
    repetition, frequency, presence: [m, 1] float32; 1, 0 and 0: off
    held:                            [slots, num_words] int32, bits as in TokenMasks: in prompt or output
    counts:                          [slots, vocab_size] int32, of output tokens
    """

    row_index: torch.Tensor
    slots: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    held: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGroup:
    """Rows whose log-probabilities are gathered together.

    row_index: [m] int64; places: the same on the host
    num_top:   likeliest tokens that are gathered; wanted: how many of them each row has asked for
    """

    row_index: torch.Tensor
    places: list[int]
    num_top: int
    wanted: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """See the module.

    temperatures:     [rows] float32; 0: greedy
    top_ks:           [rows] int64; 0: off
    top_ps, min_ps:   [rows] float32; 1 and 0: off
    seeds, positions: [rows] int64; position: index of the token among its request's output tokens
    vocab_limits:     [rows] int64, first id that is padding, None: there is none; min_vocab_limit: the smallest of them
    all_greedy, any_filtered (top-k or top-p), any_min_p, max_top_k, has_open_nucleus (top-p without top-k):
                      known on the host, so that nothing waits for the device; of the rows that are not greedy
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    all_greedy: bool
    any_filtered: bool
    any_min_p: bool
    max_top_k: int
    has_open_nucleus: bool
    vocab_limits: torch.Tensor | None = None
    min_vocab_limit: int = 0
    grammar: TokenMasks | None = None
    allowed: TokenMasks | None = None
    bad_words: TokenValues | None = None
    bias: TokenValues | None = None
    held_back: TokenValues | None = None
    """End tokens, while a row has fewer than min_tokens."""
    penalties: Penalties | None = None
    logprobs: tuple[LogprobGroup, ...] = ()
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS

    @property
    def changes_logits(self) -> bool:
        """True when any row's logits are changed before the greedy choice, other than that padding is masked."""
        stages = (
            self.grammar,
            self.allowed,
            self.bad_words,
            self.bias,
            self.held_back,
            self.penalties,
        )
        return any(stage is not None for stage in stages)
