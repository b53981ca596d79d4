"""SamplingParams: how one request's tokens are chosen and when they end.

Called by: users (`from phalanx import SamplingParams`), the API server, and, deepest, the sampler.
Checked where it is built, in the front end: a worker never meets a value that it must refuse.
"""

import math
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from ..shm.errors import ServingError

MAX_SEED = 2**63 - 1
MAX_GRAMMAR_CHARACTERS = 1 << 18
MAX_LARK_CHARACTERS = 1 << 16
"""Rules are read by recursion; a chain of them this long takes some 80 MB."""
MAX_SAMPLES = 128
MAX_STOPS = 1024
MAX_LISTED_TOKENS = 1024
"""Longest stop_token_ids, logit_bias, and word of bad_words_token_ids."""
MAX_BAD_WORDS = 1024
MAX_TOP_K = 2**31 - 1
"""More than any vocabulary: what is larger means the same."""
MIN_TEMPERATURE = 0.01
"""A temperature between 0 and this is raised to it: below, probabilities overflow without being greedy."""


class SamplingParamsError(ServingError):
    """A sampling parameter is out of its range. `field`: which one."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form that an output must have. Exactly one field is set.

    choice:      one of these texts
    json:        JSON that fits this schema, given as JSON text
    json_object: any JSON object
    regex:       a text that this regular expression matches as a whole
    grammar:     a text of this grammar, in llguidance's dialect of Lark

    Raises SamplingParamsError. Whether the engine can honour it is known when it is compiled.
    """

    choice: tuple[str, ...] | None = None
    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if self.choice is not None:
            msgspec.structs.force_setattr(
                self, "choice", _listed("structured_outputs.choice", self.choice, None)
            )
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        _require(len(given) == 1, "structured_outputs", f"must have exactly one form, not {len(given)}")
        (name,) = given
        field = f"structured_outputs.{name}"
        if name == "json_object":
            _require(isinstance(self.json_object, bool), field, "must be true or false")
            return
        texts = self.choice if self.choice is not None else (getattr(self, name),)
        _require(len(texts) > 0, field, "must not be empty")
        for text in texts:
            _require(isinstance(text, str) and text != "", field, "must be text, and not empty")
            _require("\0" not in text, field, "must not hold NUL")
        limit = MAX_LARK_CHARACTERS if name == "grammar" else MAX_GRAMMAR_CHARACTERS
        _require(self.num_characters <= limit, field, f"must not be longer than {limit} characters")

    @property
    def num_characters(self) -> int:
        """Length of the specification."""
        return sum(map(len, (*(self.choice or ()), self.json or "", self.regex or "", self.grammar or "")))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's tokens are chosen and when they end. What depends on the model is checked in its front end.

    temperature:    0 is greedy; otherwise logits are divided by it. [0, 2]
    top_p:          smallest set of tokens whose probability reaches it, after min_p and top_k. (0, 1]
    top_k:          the k likeliest tokens; ties at the k-th all stay. 0 or -1: off
    min_p:          tokens at least this part as likely as the likeliest, after temperature. [0, 1], 0: off
    repetition_penalty: divides the positive and multiplies the other logits of tokens of prompt and output. > 0, 1: off
    frequency_penalty:  subtracted from a token's logit for each time the output holds it. [-2, 2]
    presence_penalty:   subtracted once from the logits of tokens that the output holds. [-2, 2]
    logit_bias:     added to the logits of these tokens; clamped to [-100, 100]. At most 1024 tokens
    allowed_token_ids: no other token is chosen. None: all
    bad_words:      texts that the output must not hold, as their own tokens spell them
    bad_words_token_ids: their tokens; filled in where the request is tokenised. May be given instead
    seed:           same seed, prompt and parameters: same tokens. None: a random one is drawn at admission
    max_tokens:     output tokens at most; None: what the context length leaves
    min_tokens:     output tokens before an end-of-sequence or stop token may come
    stop:           strings that end the output; the text is cut before the match
    stop_token_ids: tokens that end the output, beside the model's own
    ignore_eos:     do not end at the model's end-of-sequence tokens
    skip_special_tokens, include_stop_str_in_output, detokenize: what the text shows
    n:              outputs for one prompt; number i draws with seed + i
    best_of:        outputs that are made, of which the n with the highest mean log-probability of their tokens are
                    given, best first. None: n. They are known at the end only
    logprobs:       log-probabilities of each output token and of so many likeliest ones. -1: of the whole
                    vocabulary; None: none. The server limits it (`model.max_logprobs`)
    prompt_logprobs: the same for the tokens of the prompt
    structured_outputs: the form that the output must have

    Raises SamplingParamsError, naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._check_distribution()
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", "must not be greater than max_tokens")
        stop = _texts("stop", self.stop, MAX_STOPS)
        _require(self.detokenize or not stop, "stop", "needs detokenize")
        msgspec.structs.force_setattr(self, "stop", stop)
        msgspec.structs.force_setattr(
            self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_LISTED_TOKENS)
        )
        for field in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            _require(isinstance(getattr(self, field), bool), field, "must be true or false")
        _check_int("n", self.n, 1, MAX_SAMPLES)
        _require(self.n == 1 or self.temperature > 0.0, "n", "must be 1 when temperature is 0")
        if self.best_of is not None:
            _check_int("best_of", self.best_of, self.n, MAX_SAMPLES)
            greedy_problem = "must be 1 when temperature is 0"
            _require(self.best_of == 1 or self.temperature > 0.0, "best_of", greedy_problem)
        for field in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, field)) is not None:
                _check_int(field, value, -1, None)
        is_form = self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputs)
        _require(is_form, "structured_outputs", "must be StructuredOutputs")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", MIN_TEMPERATURE)

    def _check_distribution(self) -> None:
        self._set_number("temperature", 0.0, 2.0)
        self._set_number("top_p", 0.0, 1.0)
        _require(self.top_p > 0.0, "top_p", "must be greater than 0")
        _check_int("top_k", self.top_k, -1, None)
        if self.top_k > MAX_TOP_K:
            msgspec.structs.force_setattr(self, "top_k", MAX_TOP_K)
        self._set_number("min_p", 0.0, 1.0)
        self._set_number("repetition_penalty", 0.0, sys.float_info.max)
        _require(self.repetition_penalty > 0.0, "repetition_penalty", "must be greater than 0")
        self._set_number("frequency_penalty", -2.0, 2.0)
        self._set_number("presence_penalty", -2.0, 2.0)
        _require(isinstance(self.logit_bias, dict), "logit_bias", "must map token ids to numbers")
        _token_ids("logit_bias", self.logit_bias, MAX_LISTED_TOKENS)
        biases = {
            token_id: _number("logit_bias", value, -math.inf, math.inf)
            for token_id, value in self.logit_bias.items()
        }
        msgspec.structs.force_setattr(self, "logit_bias", biases)
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, None)
            _require(len(allowed) > 0, "allowed_token_ids", "must not be empty")
            msgspec.structs.force_setattr(self, "allowed_token_ids", allowed)
        msgspec.structs.force_setattr(self, "bad_words", _texts("bad_words", self.bad_words, MAX_BAD_WORDS))
        # Each text may be spelled in two ways.
        words = _listed("bad_words_token_ids", self.bad_words_token_ids, 2 * MAX_BAD_WORDS)
        words = tuple(_token_ids("bad_words_token_ids", word, MAX_LISTED_TOKENS) for word in words)
        _require(all(words), "bad_words_token_ids", "must hold no empty list")
        msgspec.structs.force_setattr(self, "bad_words_token_ids", words)

    def _set_number(self, field: str, low: float, high: float) -> None:
        """Have a plain float in a field, whatever kind of number the user gave: that is all that goes over the wire."""
        value = getattr(self, field)
        number = _number(field, value, low, high)
        if type(value) is not float:
            msgspec.structs.force_setattr(self, field, number)

    @property
    def known_output_len(self) -> int | None:
        """Tokens of an output, whatever they are; None: it may end earlier."""
        if self.max_tokens is None or self.stop or self.structured_outputs is not None:
            return None
        can_end_early = not self.ignore_eos or bool(self.stop_token_ids)
        return None if can_end_early and self.min_tokens < self.max_tokens else self.max_tokens

    @property
    def num_samples(self) -> int:
        """Outputs that are made for one prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken and no noise is drawn."""
        return self.temperature == 0.0


def _require(condition: bool, field: str, problem: str) -> None:
    if not condition:
        raise SamplingParamsError(field, problem)


def _number(field: str, value: Any, low: float, high: float) -> float:
    # A NaN is in no range. True is an int to Python, and to nobody else.
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise SamplingParamsError(field, f"must be a number in [{low:g}, {high:g}], not {_shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _check_int(field: str, value: Any, low: int, high: int | None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise SamplingParamsError(field, f"must be an integer {bounds}, not {_shown(value)}")


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:
        return "one of thousands of digits"


def _listed(field: str, value: Any, limit: int | None) -> tuple[Any, ...]:
    _require(isinstance(value, Iterable) and not isinstance(value, str | bytes), field, "must be a list")
    listed = tuple(value)
    _require(limit is None or len(listed) <= limit, field, f"must hold at most {limit} entries")
    return listed


def _token_ids(field: str, value: Any, limit: int | None) -> tuple[int, ...]:
    listed = _listed(field, value, limit)
    for token_id in listed:
        _check_int(field, token_id, 0, None)
    return listed


def _texts(field: str, value: Any, limit: int) -> tuple[str, ...]:
    """One text or several; a user may write either."""
    listed = (value,) if isinstance(value, str) else _listed(field, value, limit)
    for text in listed:
        _require(isinstance(text, str) and text != "", field, "must hold non-empty strings")
    return listed
