"""Grammars by llguidance: JSON schema, regular expressions, Lark, choices.

Called by: InputProcessor checks specifications in the front end, CompilerPool compiles in the engine core.
llguidance refuses what it cannot hold an output to; nothing is ignored silently.

Of end tokens the library knows the model's own only, so they are all up to us here: allowed exactly where the
output fits the grammar as it stands, and never fed to the library, which would count some of them and some not.
Its error state is for good, so nothing is fed that was not probed, and a matcher that broke by itself (a limit of
the library, in an output that no bound holds) allows nothing but end tokens, and refuses those.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ...workers.sampling_params import StructuredOutputs
from ..tokenizer import Tokenizer
from .backend import GrammarError, Words
from .deep_stack import call_on_deep_stack

MAX_CACHED_GRAMMARS = 64
MAX_MESSAGE_CHARACTERS = 200
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As json.dumps writes. White space without a bound lets a small model go on with it for ever."""
_OPTIONS_KEY = "x-guidance"


def check_spec(spec: StructuredOutputs) -> None:
    """Refuse what can be seen to be wrong without a tokenizer. Raises GrammarError.

    Takes milliseconds; for the largest specifications up to a second, in which other threads run.
    """
    source = to_llguidance(spec)
    problem = call_on_deep_stack(lambda: LLMatcher.validate_grammar(source))
    if problem:
        raise GrammarError(_first_words(problem))


def to_llguidance(spec: StructuredOutputs) -> str:
    """Write a specification as the library reads it. Raises GrammarError when it is not even text or JSON."""
    try:
        return _write(spec)
    # JSON that is too deep for the library or for us, and text that is no Unicode (half a surrogate pair).
    except (ValueError, RecursionError) as error:
        raise GrammarError(_first_words(str(error))) from None


def _write(spec: StructuredOutputs) -> str:
    if spec.choice is not None:
        texts = " | ".join(json.dumps(text) for text in dict.fromkeys(spec.choice))
        # One terminal: as alternatives of a rule, each would be an item of the parser, which takes 2000.
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if spec.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_STYLE)
    if spec.json is not None:
        return LLMatcher.grammar_from_json_schema(json.dumps(_read_schema(spec.json)), defaults=_JSON_STYLE)
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    assert spec.grammar is not None
    return LLMatcher.grammar_from_lark(spec.grammar)


class LLGuidanceCompiler:
    """Compiles for one tokenizer, which is prepared with the first grammar: that takes up to a second.

    load_tokenizer: called once
    vocab_size:     of the model; ids that the tokenizer does not know are never allowed
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], *, vocab_size: int) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._grammars: OrderedDict[str, LLGuidanceGrammar] = OrderedDict()

    def compile(self, spec: StructuredOutputs) -> "LLGuidanceGrammar":
        """See GrammarCompiler. The same specification again costs nothing."""
        source = to_llguidance(spec)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._prepare()
            known = self._grammars.get(source)
            if known is not None:
                self._grammars.move_to_end(source)
                return known
        matcher = LLMatcher(self._tokenizer, source)
        if matcher.is_error():
            raise GrammarError(_first_words(matcher.get_error()))
        grammar = LLGuidanceGrammar(matcher)
        with self._lock:
            self._grammars[source] = grammar
            if len(self._grammars) > MAX_CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _prepare(self) -> LLTokenizer:
        tokenizer = self._load_tokenizer()
        text = tokenizer.to_json()
        if text is None:
            raise GrammarError("the model has no tokenizer.json, which structured outputs need")
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=tokenizer.eos_token_id)


class LLGuidanceGrammar:
    """A compiled grammar: a matcher at its beginning, which is copied."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        # The library refuses to use one matcher from two threads at once.
        self._lock = threading.Lock()

    def new_matcher(self, end_token_ids: frozenset[int]) -> "LLGuidanceMatcher":
        """See Grammar."""
        with self._lock:
            return LLGuidanceMatcher(self._matcher.deep_copy(), end_token_ids)


class LLGuidanceMatcher:
    """See Matcher. One thread at a time."""

    def __init__(self, matcher: LLMatcher, end_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        ends = np.array(sorted(end_token_ids), dtype=np.int64)
        self._end_words, self._end_bits = ends >> 5, np.uint32(1) << (ends & 31).astype(np.uint32)
        self._has_ended = False
        self._is_stuck = False

    @property
    def is_finished(self) -> bool:
        return self._has_ended or self._matcher.is_stopped()

    @property
    def problem(self) -> str | None:
        if self._matcher.is_error():
            return _first_words(self._matcher.get_error())
        if self._is_stuck:
            return "the grammar asks for a token that ends the output (stop_token_ids) where it cannot end"
        return None

    def fill(self, words: Words) -> None:
        words[:] = 0
        if not self.is_finished:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            # Also those that the library takes for text, or for its own: several may share a word.
            np.bitwise_and.at(words, self._end_words, ~self._end_bits)
        if self.is_finished or self._matcher.is_accepting():
            np.bitwise_or.at(words, self._end_words, self._end_bits)
        self._is_stuck = not words.any()

    def accept(self, token_ids: Sequence[int]) -> bool:
        if self.probe(token_ids) < len(token_ids):
            return False
        if token_ids and token_ids[-1] in self._end_token_ids:
            self._has_ended = True
            token_ids = token_ids[:-1]
        if token_ids:
            # Fewer: what comes after them is beyond a limit of the library, and the matcher has broken.
            return self._matcher.try_consume_tokens(list(token_ids)) == len(token_ids)
        return True

    def probe(self, token_ids: Sequence[int]) -> int:
        if self._has_ended or self._matcher.is_error():
            return 0
        text = list(token_ids)
        first_end = next((i for i, one in enumerate(text) if one in self._end_token_ids), len(text))
        num_text = int(self._matcher.validate_tokens(text[:first_end])) if first_end else 0
        if num_text < first_end or first_end == len(text):
            return num_text
        # Whether an end may come there is known only from the state there.
        if num_text:
            self._matcher.try_consume_tokens(text[:first_end])
        is_accepting = self._matcher.is_accepting()
        if num_text:
            self._matcher.rollback(num_text)
        return num_text + 1 if is_accepting else num_text

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)


def _read_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError("the schema must be an object or true, and allow something")
    if _OPTIONS_KEY in schema:
        raise GrammarError(f"the schema must not hold {_OPTIONS_KEY!r}")
    return schema


def _first_words(problem: str) -> str:
    """Keep what a client can use: the library also prints its state and the whole grammar."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("error:")), lines[0])
    return reason.removeprefix("error:").strip()[:MAX_MESSAGE_CHARACTERS]
