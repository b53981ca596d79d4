"""Shapes of the OpenAI API: what clients send, what they get back.

Called by: routes.py. Requests are decoded by msgspec, which refuses wrong types, a boolean for a number and
numbers that JSON does not have; null is the same as absent; unknown fields are ignored, because client
libraries add some. What the fields may hold is checked in validation.py.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only parts of type "text" can be served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """include_usage: send the usage in one more chunk, before the end."""

    include_usage: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """The schema of a response_format. name and strict are accepted, and change nothing: every schema is held to."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What form the answer shall have, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputsField(msgspec.Struct, frozen=True, kw_only=True):
    """The same in vLLM's words, with more forms. json: a schema, as an object or as text."""

    choice: list[str] | None = None
    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None

    structural_tag: Any = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of completion share. The last few cannot be served yet: see validation.py."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    n: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    timeout_s: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    best_of: int | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of POST /v1/completions. prompt: a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    suffix: str | None = None


class ChatCompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    continue_final_message: bool | None = None
    chat_template: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens whose KV was in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one HTTP request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry for each token of the text.

    token_logprobs, top_logprobs: null for the first token of an echoed prompt
    text_offset: where each token begins in the whole text, an echoed prompt included
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token at one position of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry for each prompt token, by token id; null for the first."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or one piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/completions, whole or one chunk. usage: UNSET leaves it out, None writes null."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token that might have come. bytes: its own, also where `token` cannot be text."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """One token that came, and the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry for each token of the message."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message that the model wrote."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/chat/completions without streaming."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one chunk adds to the message. Empty in the last one."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed /v1/chat/completions. usage: UNSET leaves it out, None writes null."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of /v1/models. weights_version: as `system_fingerprint` of the answers."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["phalanx"] = "phalanx"
    root: str
    parent: None = None
    max_model_len: int
    weights_version: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /detokenize."""

    prompt: str
