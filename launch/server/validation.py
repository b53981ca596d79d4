"""From a decoded body to what the engine takes: sampling parameters, prompts, messages for the template.

Called by: routes.py, before a request is admitted. Pure. Whatever is wrong is an ApiError 400 that names the
field as the client wrote it; what the engine cannot do yet is refused when it would change the answer, and
accepted when it is set to what it is anyway.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from ...engine.grammar.backend import GrammarError
from ...engine.grammar.llguidance_backend import check_spec
from ...engine.input_processor import RequestOptions
from ...workers.sampling_params import SamplingParams, SamplingParamsError, StructuredOutputs
from .errors import ApiError, invalid
from .protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    SamplingFields,
    StructuredOutputsField,
)

T = TypeVar("T")

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_ID_DIGITS = 18
MAX_BAD_WORD_CHARACTERS = 1 << 14
"""Of all bad words together: each is tokenised twice."""
MAX_SAMPLES_IN_ALL = 2048
"""Of all prompts of a request, when there are several of each."""
DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions when the client says nothing, as OpenAI has it."""

# Each field that is not supported yet, with the values (besides null) that leave the answer as it is.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "return_token_ids": (False,),
    "kv_transfer_params": ({},),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "suffix": ("",),
    "continue_final_message": (False,),
    "chat_template": (),
    "tools": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
}


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode JSON into `kind`. Raises ApiError 400: bad JSON, not an object, a field of the wrong type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(None, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise invalid(None, "the body is nested too deeply") from None


def sampling_params(request: SamplingFields, *, vocab_size: int) -> SamplingParams:
    """Check all fields that say how tokens are chosen. `max_tokens` stays None when chat left it open."""
    _refuse_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "is only allowed with stream")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs", "is not allowed with stream")
    max_tokens, max_name = request.max_tokens, "max_tokens"
    logprobs: int | None = None
    prompt_logprobs = request.prompt_logprobs
    match request:
        case ChatCompletionRequest():
            logprobs = (request.top_logprobs or 0) if request.logprobs else None
            if request.echo:
                raise invalid("echo", "is not supported for chat")
            if request.max_completion_tokens is not None:
                max_tokens, max_name = request.max_completion_tokens, "max_completion_tokens"
        case CompletionRequest():
            logprobs = request.logprobs
            if request.echo and logprobs is not None:
                prompt_logprobs = _larger(logprobs, prompt_logprobs)
            if max_tokens is None:
                # Never below min_tokens, which the client did ask for.
                max_tokens = max(DEFAULT_COMPLETION_TOKENS, request.min_tokens or 0)
            elif is_scoring(request):
                max_tokens = 1
        case _:
            pass
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid("stop", f"must hold at most {MAX_STOP_STRINGS} strings")
    if any(len(text) > MAX_STOP_CHARACTERS for text in stop):
        raise invalid("stop", f"must hold strings of at most {MAX_STOP_CHARACTERS} characters")
    stop_token_ids = tuple(request.stop_token_ids or ())
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid("stop_token_ids", f"must hold at most {MAX_STOP_TOKEN_IDS} ids")
    _in_vocabulary("stop_token_ids", stop_token_ids, vocab_size)
    if sum(map(len, request.bad_words or ())) > MAX_BAD_WORD_CHARACTERS:
        raise invalid("bad_words", f"must hold at most {MAX_BAD_WORD_CHARACTERS} characters in all")
    if len(request.allowed_token_ids or ()) > vocab_size:
        raise invalid("allowed_token_ids", f"must hold at most {vocab_size} ids, as the vocabulary does")
    top_k = request.top_k
    if top_k is not None and top_k >= vocab_size:
        top_k = 0
    values: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": top_k,
        "seed": None if request.seed == -1 else request.seed,
        "min_tokens": request.min_tokens,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "ignore_eos": request.ignore_eos,
        "skip_special_tokens": request.skip_special_tokens,
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "n": request.n,
        "best_of": _best_of(request),
        "min_p": request.min_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": _logit_bias(request.logit_bias, vocab_size),
        "allowed_token_ids": _in_vocabulary("allowed_token_ids", request.allowed_token_ids, vocab_size),
        "bad_words": request.bad_words,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "structured_outputs": structured_outputs(request),
    }
    try:
        # max_tokens is always passed: None means "what the context leaves", not the default of 16.
        return SamplingParams(**{k: v for k, v in values.items() if v is not None or k == "max_tokens"})
    except SamplingParamsError as error:
        names = {"max_tokens": max_name}
        if isinstance(request, ChatCompletionRequest):
            names["logprobs"] = "top_logprobs"
        field = names.get(error.field, error.field)
        raise invalid(field, error.problem.replace("max_tokens", max_name)) from None


def _best_of(request: SamplingFields) -> int | None:
    """The samples to choose from: OpenAI has it for completions only, and they are known at the end only."""
    if request.best_of is None or request.best_of == 1 == (request.n or 1):
        return None
    if isinstance(request, ChatCompletionRequest):
        raise invalid("best_of", "is for /v1/completions only")
    if request.stream and request.best_of != (request.n or 1):
        raise invalid("best_of", "cannot be streamed: which samples are the best is known at the end")
    return request.best_of


def check_num_samples(num_prompts: int, params: SamplingParams) -> None:
    """Refuse more samples for all prompts together than any queue takes."""
    if params.num_samples > 1 and num_prompts * params.num_samples > MAX_SAMPLES_IN_ALL:
        raise invalid(
            "n" if params.best_of is None else "best_of",
            f"{num_prompts} prompts with {params.num_samples} samples each are more than {MAX_SAMPLES_IN_ALL}",
        )


def is_scoring(request: CompletionRequest) -> bool:
    """True when the prompt is to be judged and nothing written: echo with max_tokens 0."""
    return bool(request.echo) and request.max_tokens == 0


def truncate_prompt(
    ids: list[int], request: SamplingFields, params: SamplingParams, *, max_model_len: int
) -> list[int]:
    """Keep the last tokens of a prompt, as many as the client says. -1: what leaves room for the output."""
    limit = request.truncate_prompt_tokens
    if limit is None:
        return ids
    if limit != -1 and not 1 <= limit <= max_model_len:
        raise invalid("truncate_prompt_tokens", f"must be -1 or in [1, {max_model_len}]")
    if limit == -1:
        limit = max(1, max_model_len - (params.max_tokens or 1))
    return ids[-limit:]


def request_options(request: SamplingFields) -> RequestOptions:
    """Take the fields that say how a request is treated beside others. The engine's front end checks them."""
    return RequestOptions(
        priority=request.priority or 0, cache_salt=request.cache_salt, timeout_s=request.timeout_s
    )


def structured_outputs(request: SamplingFields) -> StructuredOutputs | None:
    """Read the form that the answer shall have, from whichever of the two fields has it, and check it."""
    wanted = request.response_format
    extra = request.structured_outputs
    if extra is not None and extra == StructuredOutputsField():
        extra = None
    if wanted is not None and wanted.type == "text":
        wanted = None
    if wanted is None and extra is None:
        return None
    if extra is not None and extra.structural_tag is not None:
        raise _unsupported("structured_outputs.structural_tag")
    if wanted is not None and extra is not None:
        raise invalid("structured_outputs", "is not allowed together with response_format")
    name = "structured_outputs" if extra is not None else "response_format"
    try:
        if extra is not None:
            schema = extra.json
            spec = StructuredOutputs(
                choice=None if extra.choice is None else tuple(extra.choice),
                json=_schema_text(schema) if schema is not None else None,
                json_object=bool(extra.json_object),
                regex=extra.regex,
                grammar=extra.grammar,
            )
        elif wanted is not None and wanted.type == "json_object":
            spec = StructuredOutputs(json_object=True)
        elif wanted is None or wanted.json_schema is None or wanted.json_schema.schema is None:
            raise invalid("response_format.json_schema.schema", "must be given")
        else:
            spec = StructuredOutputs(json=_schema_text(wanted.json_schema.schema))
        check_spec(spec)
    except SamplingParamsError as error:
        raise invalid(error.field.replace("structured_outputs", name), error.problem) from None
    except GrammarError as error:
        raise invalid(name, str(error)) from None
    return spec


def _schema_text(schema: str | dict[str, Any] | bool) -> str:
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()


def split_prompts(
    prompt: str | list[str | int | list[int]], *, vocab_size: int, max_prompts: int
) -> list[str | list[int]]:
    """Give one entry, text or token ids, for each prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "must not be empty")
    if all(isinstance(entry, int) for entry in prompt):
        return [checked_ids("prompt", prompt, vocab_size)]
    if len(prompt) > max_prompts:
        raise invalid("prompt", f"must hold at most {max_prompts} prompts, not {len(prompt)}")
    if all(isinstance(entry, str) for entry in prompt):
        return [entry for entry in prompt if isinstance(entry, str)]
    if all(isinstance(entry, list) for entry in prompt):
        return [checked_ids("prompt", entry, vocab_size) for entry in prompt if isinstance(entry, list)]
    raise invalid(
        "prompt", "must be a string, a list of strings, a list of token ids, or a list of those lists"
    )


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Turn messages into what a chat template reads: content as one string, absent fields left out."""
    if not messages:
        raise invalid("messages", "must not be empty")
    rendered = []
    for index, message in enumerate(messages):
        entry: dict[str, Any] = {
            "role": message.role,
            "content": _content(message, f"messages[{index}].content"),
        }
        for name in ("name", "tool_calls", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                entry[name] = value
        rendered.append(entry)
    return rendered


def _content(message: ChatMessage, place: str) -> str:
    match message.content:
        case str(text):
            return text
        case None:
            if message.role == "assistant" and message.tool_calls:
                return ""
            raise invalid(place, "must be given")
        case parts:
            texts = []
            for index, part in enumerate(parts):
                if part.type != "text":
                    raise invalid(f"{place}[{index}].type", f"{part.type!r} is not supported, only 'text'")
                if part.text is None:
                    raise invalid(f"{place}[{index}].text", "must be given")
                texts.append(part.text)
            return "\n".join(texts)


def _larger(first: int, second: int | None) -> int:
    """The larger of two numbers of log-probabilities, of which -1 means all."""
    return first if second is None else -1 if -1 in (first, second) else max(first, second)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if bias is None:
        return None
    found = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit()) or len(key) > MAX_ID_DIGITS:
            raise invalid("logit_bias", f"must have token ids as keys, not {key[:32]!r}")
        found[int(key)] = value
    _in_vocabulary("logit_bias", list(found), vocab_size)
    return found


def _in_vocabulary(field: str, ids: Sequence[int] | None, vocab_size: int) -> Sequence[int] | None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise invalid(field, f"must be in the vocabulary, [0, {vocab_size - 1}]")
    return ids


def checked_ids(field: str, ids: Sequence[Any], vocab_size: int) -> list[int]:
    """Check the token ids of a text. By whole passes: there may be millions."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise invalid(field, f"token id {token_id} is not in the vocabulary, [0, {vocab_size - 1}]")
    return list(ids)


def _refuse_unsupported(request: SamplingFields) -> None:
    if isinstance(request, ChatCompletionRequest):
        if request.tools == []:
            raise invalid("tools", "must not be empty")
        if request.tools is None and request.tool_choice not in (None, "none"):
            raise invalid("tool_choice", "is only allowed with tools")
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs", "is only allowed with logprobs")
    for field, off_values in UNSUPPORTED.items():
        value = getattr(request, field, None)
        if value is None or any(
            value == off and isinstance(value, bool) == isinstance(off, bool) for off in off_values
        ):
            continue
        raise _unsupported(field)


def _unsupported(field: str) -> ApiError:
    return ApiError(400, f"{field}: is not supported", param=field, code="unsupported_parameter")


def _type_error(message: str) -> ApiError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.max_tokens`" into an error that names the field."""
    problem, _, path = message.partition(" - at ")
    param = path.strip("`").removeprefix("$").removeprefix(".") or None
    if param is None and (missing := re.search(r"missing required field `([^`]*)`", problem)):
        return invalid(missing.group(1), "must be given")
    if param is None:
        problem = f"the body must be a JSON object: {problem[:1].lower()}{problem[1:]}"
        return invalid(None, problem)
    return invalid(param, f"{problem[:1].lower()}{problem[1:]}")
