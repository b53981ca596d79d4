"""From what a user sends to an `EngineCoreRequest`: checked, tokenised, complete.

Called by: `LLM` and `AsyncLLM`, in the front end. After this point nothing about a request can be refused for
its contents; an engine core never raises for one request's parameters.
Thread: `process` may be called from any thread.
"""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..workers.config import DEFAULT_MAX_LOGPROBS, ModelConfig
from ..workers.sampling_params import MAX_LISTED_TOKENS, SamplingParams
from ..workers.transformer_config import read_transformer_config
from .block_hash import extend_block_hashes, extra_keys_of
from .chat_template import ChatTemplate
from .errors import InvalidRequestError
from .grammar.backend import GrammarError
from .grammar.llguidance_backend import check_spec
from .messages import EngineCoreRequest
from .tokenizer import Tokenizer, load_tokenizer

MAX_CHARACTERS_PER_TOKEN = 512
"""More than the longest token of any tokenizer in use (runs of spaces or dashes are the longest, at about 128)."""

Prompt = str | Sequence[int]
"""Text, or token ids."""
Message = Mapping[str, Any]
"""One message of a chat: role, content, and what the template knows beyond."""


MAX_SALT_CHARACTERS = 1024
_NO_PROMPT = "the prompt must be text or a list of token ids"
MAX_PRIORITY = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a request is treated beside others.

    priority:   requests of a smaller number are admitted first, and preempted last
    cache_salt: cached prefixes are shared only with requests of the same salt
    timeout_s:  the request fails with RequestTimeoutError when it is not finished by then
    dp_rank:    the replica that computes it; None: whichever the balancer picks
    session_id: requests of one session stay on one replica where the cluster has sticky sessions
    """

    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None
    dp_rank: int | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """A request for an engine core, and the text that it came from (None: it came as tokens)."""

    core_request: EngineCoreRequest
    prompt: str | None


DEFAULT_OPTIONS = RequestOptions()


class InputProcessor:
    """Knows the model's tokenizer, chat template, vocabulary and context length.

    eos_token_ids: the model's end-of-sequence tokens
    max_model_len: longest prompt plus output in tokens
    vocab_size:    of the model; the tokenizer may know fewer ids, and the others are never sampled
    max_logprobs:  most that a request may ask for at each token; -1: no limit
    block_size:    of the engine cores' KV blocks, once it is known: prompts are hashed here then, and only here
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        vocab_size: int,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.block_size: int | None = None
        eos = [*eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
        self.eos_token_ids = tuple(token_id for token_id in dict.fromkeys(eos) if token_id < vocab_size)
        self._max_logprobs = max_logprobs
        num_real = max(tokenizer.vocab_size, *(token_id + 1 for token_id in (-1, *self.eos_token_ids)))
        # Without a tokenizer nobody knows which ids are padding.
        self._vocab_limit = num_real if 0 < tokenizer.vocab_size and num_real < vocab_size else None
        self._clock = clock

    @classmethod
    def from_model(
        cls, model: ModelConfig, *, max_model_len: int | None = None, tokenizer: Tokenizer | None = None
    ) -> "InputProcessor":
        """Read what is needed from the model's folder.

        tokenizer: None: the model's own
        max_model_len: what the engine cores reported; None: the setting, else what the model was trained for
        Raises ConfigError when the folder lacks something.
        """
        config = read_transformer_config(model.path)
        return cls(
            load_tokenizer(model.path) if tokenizer is None else tokenizer,
            eos_token_ids=config.eos_token_ids,
            max_model_len=max_model_len or model.max_model_len or config.max_position_embeddings,
            vocab_size=config.vocab_size,
            max_logprobs=model.max_logprobs,
        )

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Turn a chat into prompt tokens. The template writes all special tokens itself.

        variables: of the template, `add_generation_prompt` and `tools` among them
        Raises InvalidRequestError.
        """
        return self.tokenizer.encode(
            self.chat_template.render(messages, **variables), add_special_tokens=False
        )

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        options: RequestOptions = DEFAULT_OPTIONS,
        client_index: int = 0,
        arrived_at: float | None = None,
        caller_id: str | None = None,
    ) -> ProcessedRequest:
        """Check and complete one request. request_id, caller_id: as of `EngineCoreRequest`.

        Raises InvalidRequestError that names the field at fault.
        """
        if isinstance(prompt, str):
            check_text("prompt", prompt)
            # No tokenizer makes fewer tokens than this; text far beyond the context is not worth encoding.
            if len(prompt) > self.max_model_len * MAX_CHARACTERS_PER_TOKEN:
                raise prompt_too_long(f"{len(prompt)} characters", self.max_model_len)
            text, prompt_token_ids = prompt, self.tokenizer.encode(prompt)
        elif not _is_list(prompt):
            raise InvalidRequestError(_NO_PROMPT, field="prompt")
        else:
            text, prompt_token_ids = None, list(prompt)
            self._check_token_ids(prompt_token_ids)
        num_prompt_tokens = len(prompt_token_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        if num_prompt_tokens >= self.max_model_len:
            raise prompt_too_long(f"{num_prompt_tokens} tokens", self.max_model_len)
        _check_options(options)
        arrived_at = self._clock() if arrived_at is None else arrived_at
        spec = params.structured_outputs
        if spec is not None:
            try:
                check_spec(spec)
            except GrammarError as error:
                raise InvalidRequestError(
                    f"structured_outputs: {error}", field="structured_outputs"
                ) from None
        block_hashes: list[bytes] = []
        if self.block_size is not None:
            extra_keys = extra_keys_of(options.cache_salt)
            extend_block_hashes(block_hashes, prompt_token_ids, self.block_size, extra_keys)
        core_request = EngineCoreRequest(
            request_id=request_id,
            client_index=client_index,
            prompt_token_ids=prompt_token_ids,
            sampling_params=self._complete(params, num_prompt_tokens),
            eos_token_ids=self.eos_token_ids,
            seed=params.seed if params.seed is not None else random.getrandbits(63),
            arrived_at=arrived_at,
            priority=options.priority,
            cache_salt=options.cache_salt,
            deadline_at=None if options.timeout_s is None else arrived_at + options.timeout_s,
            vocab_limit=self._vocab_limit,
            block_hashes=block_hashes,
            routed_dp_rank=options.dp_rank,
            session_id=options.session_id,
            caller_id=caller_id,
        )
        return ProcessedRequest(core_request=core_request, prompt=text)

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        budget = self.max_model_len - num_prompt_tokens
        for field, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
            for text in texts:
                check_text(field, text)
        self._check_sampling(params)
        if params.bad_words:
            words = tuple(self._spell(word) for word in params.bad_words)
            spelled = dict.fromkeys((*params.bad_words_token_ids, *(ids for word in words for ids in word)))
            params = msgspec.structs.replace(params, bad_words_token_ids=tuple(spelled))
        if params.max_tokens is not None:
            if params.max_tokens > budget:
                raise InvalidRequestError(
                    f"the prompt has {num_prompt_tokens} tokens and max_tokens is {params.max_tokens}; together "
                    f"they must not exceed the context length of {self.max_model_len} tokens",
                    field="max_tokens",
                )
            return params
        if params.min_tokens > budget:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but the context has room for {budget} more tokens",
                field="min_tokens",
            )
        return msgspec.structs.replace(params, max_tokens=budget)

    def _check_sampling(self, params: SamplingParams) -> None:
        """Check what depends on the model: ids that would stand outside a row of logits, and how much is shown."""
        listed: dict[str, Iterable[int]] = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words_token_ids": (token_id for word in params.bad_words_token_ids for token_id in word),
        }
        for field, token_ids in listed.items():
            largest = max(token_ids, default=0)
            if largest >= self.vocab_size:
                raise InvalidRequestError(
                    f"{field} holds {largest}, but the vocabulary ends at {self.vocab_size - 1}", field=field
                )
        for field in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, field)
            if wanted is None or (wanted == -1 and self._max_logprobs == -1):
                continue
            # Without a limit of the server there is still no more than all.
            limit = self.vocab_size if self._max_logprobs == -1 else self._max_logprobs
            if wanted == -1 or wanted > limit:
                raise InvalidRequestError(
                    f"{field} must be at most {limit}, the limit of this server, not {wanted}", field=field
                )

    def _spell(self, word: str) -> list[tuple[int, ...]]:
        """Tokens of a bad word: as it stands, and as it stands after a space."""
        plain = tuple(self.tokenizer.encode(word, add_special_tokens=False))
        if not plain:
            raise InvalidRequestError(f"bad_words holds {word!r}, which has no tokens", field="bad_words")
        if len(plain) > MAX_LISTED_TOKENS:
            raise InvalidRequestError(
                f"bad_words holds a text of {len(plain)} tokens; {MAX_LISTED_TOKENS} are the most",
                field="bad_words",
            )
        spaced = tuple(self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        # Otherwise the space is a token of its own, and what follows it is the word as it stands.
        is_other = len(spaced) == len(plain) and spaced[0] != plain[0]
        return [plain, spaced] if is_other else [plain]

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        # By whole passes: a loop over the ids of a large batch takes longer than its first step.
        for kind in set(map(type, token_ids)):
            if not issubclass(kind, int) or kind is bool:
                raise InvalidRequestError(_NO_PROMPT, field="prompt")
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"the prompt holds token id {token_id}; ids are 0 to {self.vocab_size - 1}",
                    field="prompt",
                )


def prompt_too_long(length: str, max_model_len: int) -> InvalidRequestError:
    """Say that a prompt leaves no room for an output. length: how long it is, in words."""
    return InvalidRequestError(
        f"the prompt has {length}; with at least one output token it must fit the context length of "
        f"{max_model_len} tokens",
        field="prompt",
    )


def check_text(field: str, text: str) -> None:
    """Refuse what is no text, or half of a pair of UTF-16, which Python takes for a character and no tokenizer does.

    Raises InvalidRequestError that names the field.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field} must be text", field=field)
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"holds {text[error.start]!r}, which is no character"
        raise InvalidRequestError(f"{field} {problem}", field=field) from None


def _check_options(options: RequestOptions) -> None:
    """Check kinds as well: what an engine core cannot decode it drops, and nobody would hear of it."""
    priority, dp_rank = options.priority, options.dp_rank
    if not _is_integer(priority) or not -MAX_PRIORITY <= priority < MAX_PRIORITY:
        raise InvalidRequestError("priority must be an integer of 32 bits", field="priority")
    if dp_rank is not None and (not _is_integer(dp_rank) or dp_rank < 0):
        raise InvalidRequestError("dp_rank must be the number of a replica", field="dp_rank")
    for field, text in (("cache_salt", options.cache_salt), ("session_id", options.session_id)):
        if text is not None:
            check_text(field, text)
    salt = options.cache_salt
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARACTERS:
        raise InvalidRequestError(
            f"cache_salt must have 1 to {MAX_SALT_CHARACTERS} characters", field="cache_salt"
        )
    timeout_s = options.timeout_s
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    # A NaN is in no range.
    if timeout_s is not None and not (is_number and 0 < timeout_s < float("inf")):
        raise InvalidRequestError("timeout_s must be a positive number", field="timeout_s")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, bytes)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
