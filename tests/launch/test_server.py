"""The OpenAI-compatible server over a small engine: answers, streams, errors, leaving clients, draining."""

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.engine.errors import InvalidRequestError, QueueFullError, ReplicaLostError, RequestTimeoutError
from phalanx.engine.input_processor import RequestOptions
from phalanx.launch.server.app import create_app
from phalanx.launch.server.service import Service
from phalanx.workers.sampling_params import StructuredOutputs
from support.server import ANSWER, FakeCluster, FakeEngine, LetterCodec, make_service, make_stats

COMPLETION = {"model": "tiny", "prompt": "Say it", "max_tokens": 20}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}


def client_of(service: Service, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(service), raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)


def serve(service: Service, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with client_of(service) as client:
            return await work(client)

    return asyncio.run(run())


def post(body: Any, path: str = "/v1/completions", service: Service | None = None) -> httpx.Response:
    return serve(service or make_service(), lambda client: client.post(path, json=body))


def get(path: str, service: Service | None = None, **headers: str) -> httpx.Response:
    return serve(service or make_service(), lambda client: client.get(path, headers=headers))


def with_openai(
    service: Service, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]], key: str = "none"
) -> Any:
    async def run() -> Any:
        http = client_of(service)
        async with openai.AsyncOpenAI(
            api_key=key, base_url="http://test/v1", http_client=http, max_retries=0
        ) as client:
            return await work(client)

    return asyncio.run(run())


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["content-type"] == "application/json"
    return dict(error)


def normalise(text: str) -> str:
    return re.sub(r'"created":\d+', '"created":0', re.sub(r"cmpl-[0-9a-f]{32}", "cmpl-ID", text))


# Answers


def test_requests_are_told_apart_whatever_id_their_clients_give_them() -> None:
    class Recording(FakeEngine):
        async def generate(self, *arguments: Any, **named: Any) -> Any:
            request_ids.append(arguments[2])
            async for output in FakeEngine.generate(self, *arguments, **named):
                yield output

    request_ids: list[str] = []

    async def twice(client: httpx.AsyncClient) -> list[httpx.Response]:
        headers = {"X-Request-Id": "same"}
        bodies = [{**COMPLETION, "prompt": prompt, "echo": True} for prompt in ("a", "b")]
        return await asyncio.gather(
            *[client.post("/v1/completions", json=body, headers=headers) for body in bodies]
        )

    answers = [answer.json() for answer in serve(make_service(Recording()), twice)]

    assert [answer["choices"][0]["text"] for answer in answers] == ["a" + ANSWER, "b" + ANSWER]
    assert len({answer["id"] for answer in answers}) == len(set(request_ids)) == 2


def test_a_completion_holds_text_usage_and_reason() -> None:
    answer = with_openai(make_service(), lambda client: client.completions.create(**COMPLETION))

    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        6,
        13,
        19,
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_a_chat_answer_holds_a_message() -> None:
    answer = with_openai(make_service(), lambda client: client.chat.completions.create(**CHAT))

    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len("user:Hi\nA:")


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_every_shape_of_prompt_is_served(prompt: Any, asked: list[list[int]]) -> None:
    engine = FakeEngine()

    answer = post({**COMPLETION, "prompt": prompt}, service=make_service(engine)).json()

    assert [ids for ids, _ in engine.asked] == asked
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (index, ANSWER) for index in range(len(asked))
    ]
    assert answer["usage"]["completion_tokens"] == len(ANSWER) * len(asked)


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_echo_puts_the_prompt_in_front(prompt: Any) -> None:
    body = {**COMPLETION, "prompt": prompt, "echo": True}

    whole = post(body).json()["choices"][0]["text"]
    streamed = post({**body, "stream": True}).text

    texts = [json.loads(line[6:])["choices"][0]["text"] for line in streamed.split("\n\n")[:-2]]
    assert whole == "ab" + ANSWER
    assert texts[0] == "ab"
    assert "".join(texts) == whole


def test_parameters_reach_the_engine() -> None:
    engine = FakeEngine()
    body = {
        **COMPLETION,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 999,
        "seed": 7,
        "stop": "x",
        "min_tokens": 2,
    }

    post(body, service=make_service(engine))

    ((_, params),) = engine.asked
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 0, 7)
    assert (params.stop, params.min_tokens, params.max_tokens) == (("x",), 2, 20)


@pytest.mark.parametrize(
    ("path", "body", "max_tokens"),
    [("/v1/completions", COMPLETION, 16), ("/v1/chat/completions", CHAT, None)],
)
def test_without_max_tokens_completions_get_16_and_chats_what_is_left(
    path: str, body: dict[str, Any], max_tokens: int | None
) -> None:
    engine = FakeEngine()

    post({**body, "max_tokens": None}, path, make_service(engine))

    assert engine.asked[0][1].max_tokens == max_tokens


def test_the_default_of_max_tokens_gives_way_near_the_end_of_the_context() -> None:
    engine = FakeEngine()

    answer = post({"model": "tiny", "prompt": "a" * 60}, service=make_service(engine)).json()

    assert engine.asked[0][1].max_tokens is None
    assert answer["usage"]["completion_tokens"] == 4


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    answer = post({**CHAT, "max_completion_tokens": 3}, "/v1/chat/completions").json()

    assert answer["choices"][0]["message"]["content"] == ANSWER[:3]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_text_parts_are_joined_and_absent_fields_left_out() -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    post(
        {**CHAT, "messages": [{"role": "user", "content": parts}]},
        "/v1/chat/completions",
        make_service(engine),
    )

    assert bytes(engine.asked[0][0]) == b"user:a\nb\nA:"


@pytest.mark.parametrize(
    ("path", "body", "adds"),
    [
        ("/v1/completions", {"prompt": "a"}, True),
        ("/v1/completions", {"prompt": "a", "add_special_tokens": False}, False),
        ("/v1/completions", {"prompt": [97]}, False),
        ("/v1/chat/completions", {"messages": CHAT["messages"]}, False),
        ("/v1/chat/completions", {"messages": CHAT["messages"], "add_special_tokens": True}, True),
        ("/tokenize", {"prompt": "a"}, True),
        ("/tokenize", {"messages": CHAT["messages"]}, False),
    ],
)
def test_a_text_gets_its_special_tokens_once(path: str, body: dict[str, Any], adds: bool) -> None:
    """A chat's template has written them."""

    class Beginning(LetterCodec):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [1] * add_special_tokens + super().encode(text)

    engine = FakeEngine()

    answer = post(body, path, make_service(engine, codec=Beginning())).json()

    ids = answer["tokens"] if path == "/tokenize" else engine.asked[0][0]
    assert ids.count(1) == adds


def test_off_values_and_unknown_fields_are_accepted() -> None:
    off = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": None,
        "stream": False,
        "stream_options": None,
        "user": "u",
        "store": True,
        "metadata": {"a": 1},
        "never_heard_of": [1],
        "temperature": None,
        "response_format": {"type": "text"},
        "seed": -1,
    }

    assert post({**COMPLETION, **off, "best_of": 1, "suffix": None}).status_code == 200
    chat = {**CHAT, **off, "logprobs": False, "tool_choice": "none", "parallel_tool_calls": True}
    assert post(chat, "/v1/chat/completions").status_code == 200


# Streams


def test_a_chat_stream_is_these_bytes() -> None:
    body = {**CHAT, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}

    response = post(body, "/v1/chat/completions")

    head = '"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"tiny"'

    def chunk(choices: str, usage: str = "null") -> str:
        return f'data: {{{head},"choices":[{choices}],"usage":{usage},"system_fingerprint":null}}\n\n'

    def choice(delta: str, reason: str = "null") -> str:
        return f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}}}'

    usage = '{"prompt_tokens":10,"completion_tokens":3,"total_tokens":13,"prompt_tokens_details":{"cached_tokens":1}}'
    assert response.headers["content-type"].startswith("text/event-stream")
    assert normalise(response.text) == (
        chunk(choice('{"role":"assistant","content":""}'))
        + chunk(choice('{"content":"He"}'))
        + chunk(choice('{"content":"l"}'))
        + chunk(choice("{}", '"length"'))
        + chunk("", usage)
        + "data: [DONE]\n\n"
    )


def test_a_completion_stream_is_these_bytes() -> None:
    response = post({**COMPLETION, "max_tokens": 3, "stream": True})

    def chunk(text: str, reason: str) -> str:
        return (
            'data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"tiny",'
            f'"choices":[{{"index":0,"text":"{text}","logprobs":null,"finish_reason":{reason},"stop_reason":null}}],'
            '"system_fingerprint":null}\n\n'
        )

    assert normalise(response.text) == chunk("He", "null") + chunk("l", '"length"') + "data: [DONE]\n\n"


def test_openais_client_reads_a_stream() -> None:
    async def read(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
        return [chunk async for chunk in stream]

    chunks = with_openai(make_service(), read)

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices].count("assistant") == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ANSWER)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_several_prompts_stream_side_by_side() -> None:
    text = post({**COMPLETION, "prompt": ["a", "b", "c"], "stream": True}).text

    texts = {0: "", 1: "", 2: ""}
    for line in text.split("\n\n")[:-2]:
        (choice,) = json.loads(line[6:])["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: ANSWER, 1: ANSWER, 2: ANSWER}


def test_every_sample_is_a_choice_and_the_prompt_is_counted_once() -> None:
    answer = post({**COMPLETION, "prompt": ["a", "bc"], "n": 3}).json()

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert {choice["text"] for choice in answer["choices"]} == {ANSWER}
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 6 * len(ANSWER)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    chat = with_openai(make_service(), lambda client: client.chat.completions.create(**CHAT, n=2))
    assert [choice.message.content for choice in chat.choices] == [ANSWER, ANSWER]


def test_samples_that_are_not_shown_are_counted_as_well() -> None:
    class Choosing(FakeEngine):
        """Makes as many samples as `best_of` says, and shows the first."""

        async def generate(self, *arguments: Any, **named: Any) -> Any:
            async for output in FakeEngine.generate(self, *arguments, **named):
                shown = output.outputs if output.finished else []
                yield replace(output, outputs=shown, num_output_tokens=output.num_output_tokens * 4)

    service = make_service(Choosing())
    body = {**COMPLETION, "prompt": ["a", "bc"], "best_of": 4, "temperature": 1}

    usage = post(body, service=service).json()["usage"]

    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 2 * 4 * len(ANSWER))
    assert b'phalanx_generation_tokens_total{model_name="tiny"} 104.0' in service.metrics.render()


def test_a_prompt_that_is_only_scored_is_counted() -> None:
    service = make_service()

    usage = post({**COMPLETION, "echo": True, "max_tokens": 0, "logprobs": 1}, service=service).json()[
        "usage"
    ]

    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 0)
    text = service.metrics.render().decode()
    assert 'phalanx_prompt_tokens_total{model_name="tiny"} 6.0' in text
    assert 'phalanx_generation_tokens_total{model_name="tiny"} 0.0' in text


def test_every_sample_of_a_chat_streams_with_its_own_role_and_end() -> None:
    async def read(client: openai.AsyncOpenAI) -> list[Any]:
        return [chunk async for chunk in await client.chat.completions.create(**CHAT, n=2, stream=True)]

    choices = [chunk.choices[0] for chunk in with_openai(make_service(), read)]

    for index in range(2):
        own = [choice for choice in choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert [choice.delta.role for choice in own[1:]] == [None] * (len(own) - 1)
        assert "".join(choice.delta.content or "" for choice in own) == ANSWER
        assert [choice.finish_reason for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == "stop"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("change", "spec"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            StructuredOutputs(json=json.dumps(SCHEMA, separators=(",", ":"))),
        ),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        ({"structured_outputs": {"json": "{}"}}, StructuredOutputs(json="{}")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputs(grammar='start: "a"')),
        ({"structured_outputs": {}, "response_format": {"type": "text"}}, None),
    ],
)
def test_the_form_of_an_answer_reaches_the_engine(change: dict[str, Any], spec: Any) -> None:
    engine = FakeEngine()

    assert post({**COMPLETION, **change}, service=make_service(engine)).status_code == 200
    assert post({**CHAT, **change}, "/v1/chat/completions", make_service(engine)).status_code == 200

    assert [params.structured_outputs for _, params in engine.asked] == [spec, spec]


def test_priority_salt_and_timeout_reach_the_engine_from_every_endpoint() -> None:
    engine = FakeEngine()
    fields = {"priority": 3, "cache_salt": "s", "timeout_s": 2.5}

    post({**COMPLETION, **fields}, service=make_service(engine))
    post({**CHAT, **fields}, "/v1/chat/completions", make_service(engine))

    assert engine.options == [RequestOptions(priority=3, cache_salt="s", timeout_s=2.5)] * 2


def test_a_request_that_took_too_long_is_408() -> None:
    engine = FakeEngine(error=RequestTimeoutError("too late"))

    response = post(COMPLETION, service=make_service(engine))

    assert response.status_code == 408
    assert error_of(response)["code"] == "timeout"


def test_an_error_before_the_first_token_has_a_status_of_its_own() -> None:
    engine = FakeEngine(error=QueueFullError(3.0))

    response = post({**COMPLETION, "stream": True}, service=make_service(engine))

    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert error_of(response)["code"] == "queue_full"


def test_an_error_within_a_stream_is_an_event_and_the_stream_ends() -> None:
    engine = FakeEngine(error=ReplicaLostError("gone"), error_after=2)

    response = post({**COMPLETION, "stream": True}, service=make_service(engine))

    events = response.text.split("\n\n")
    assert response.status_code == 200
    assert json.loads(events[-3][6:])["error"]["message"] == "gone"
    assert events[-2:] == ["data: [DONE]", ""]
    assert '"finish_reason":"' not in response.text


# Errors


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 60}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"min_tokens": 30}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop_token_ids": [256]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"n": 129}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"priority": 1.5}, "priority"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
        ({"best_of": 2, "n": 3, "temperature": 1}, "best_of"),
        ({"best_of": 2, "temperature": 1, "stream": True}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": "5"}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"logit_bias": {"x": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"256": 5}}, "logit_bias"),
        ({"logit_bias": {"1.0": 5}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias[...]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [256]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [1]}, "bad_words[0]"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"bad_words": ["a" * 40] * 410}, "bad_words"),
        ({"allowed_token_ids": [1] * 257}, "allowed_token_ids"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": "a" * 64}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"model": 5}, "model"),
    ],
)
def test_a_bad_completion_parameter_is_400_and_named(change: dict[str, Any], param: str) -> None:
    response = post({**COMPLETION, **change})

    error = error_of(response)
    assert response.status_code == 400, response.text
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "a" * 64}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 60}, "max_completion_tokens"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -2, "logprobs": True}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_bad_chat_parameter_is_400_and_named(change: dict[str, Any], param: str) -> None:
    response = post({**CHAT, **change}, "/v1/chat/completions")

    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_what_the_engine_finds_wrong_is_named_as_the_client_wrote_it(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    error = InvalidRequestError("structured_outputs: too large", field="structured_outputs")
    service = make_service(FakeEngine(error=error))
    forms = {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a"},
    }

    for name, form in forms.items():
        response = post({**body, "stream": stream, name: form}, path, service)

        assert response.status_code == 400
        assert error_of(response)["param"] == name
        assert error_of(response)["message"] == f"{name}: too large"
    response = post({**CHAT, "stream": stream, "logprobs": True, "top_logprobs": 21}, "/v1/chat/completions")
    assert error_of(response)["message"].startswith("top_logprobs must be")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"a"',
        b"5",
        b"\xff\xfe",
        b'{"prompt":NaN}',
        b'{"prompt":"\\ud800"}',
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_no_json_object_is_400(content: bytes) -> None:
    headers = {"content-type": "application/json"}

    response = serve(
        make_service(), lambda client: client.post("/v1/completions", content=content, headers=headers)
    )

    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize(("change", "param"), [({"n": 128}, "n"), ({"best_of": 128}, "best_of")])
def test_prompts_and_samples_together_have_a_bound(change: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    service = make_service(engine, max_prompts=64)
    body = {**COMPLETION, **change, "temperature": 1}

    refused = post({**body, "prompt": ["a"] * 17}, service=service)

    assert (refused.status_code, error_of(refused)["param"]) == (400, param)
    assert not engine.asked
    assert post({**body, "prompt": ["a"] * 16}, service=service).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 20_000}),
        ("/v1/completions", {"prompt": ["a" * 50] * 400}),
        ("/v1/completions", {"prompt": [[97] * 50] * 400, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 1000}),
        ("/tokenize", {"prompt": "a" * 20_000, "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * 1000}),
        ("/detokenize", {"tokens": [97] * 20_000}),
    ],
)
def test_long_work_is_done_beside_the_event_loop(path: str, body: dict[str, Any]) -> None:
    threads = set()

    class Watched(LetterCodec):
        def encode(self, *arguments: Any, **named: Any) -> list[int]:
            threads.add(threading.current_thread())
            return super().encode(*arguments, **named)

        def decode(self, *arguments: Any, **named: Any) -> str:
            threads.add(threading.current_thread())
            return super().decode(*arguments, **named)

    response = post(body, path, make_service(codec=Watched(), max_prompts=500))

    assert response.status_code in (200, 400)
    assert threads
    assert threading.main_thread() not in threads


def test_many_prompts_leave_others_their_turns() -> None:
    turns = 0
    begun_at = []

    class Watched(FakeEngine):
        async def generate(self, *arguments: Any, **named: Any) -> Any:
            begun_at.append(turns)
            async for output in FakeEngine.generate(self, *arguments, **named):
                yield output

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def work(client: httpx.AsyncClient) -> httpx.Response:
        other = asyncio.create_task(take_turns())
        try:
            return await client.post("/v1/completions", json={**COMPLETION, "prompt": ["a"] * 50})
        finally:
            other.cancel()

    assert serve(make_service(Watched(), max_prompts=50), work).status_code == 200
    assert len(set(begun_at)) == 50


def test_wrong_places_and_methods_have_their_statuses() -> None:
    statuses = {
        404: [get("/v1/embeddings"), get("/v1/models/other"), post({**COMPLETION, "model": "other"})],
        405: [get("/v1/completions")],
        413: [post({**COMPLETION, "prompt": "a" * (1 << 20)})],
    }

    for status, responses in statuses.items():
        for response in responses:
            assert response.status_code == status
            error_of(response)
    assert [error_of(response)["code"] for response in statuses[404]] == [
        "route_not_found",
        "model_not_found",
        "model_not_found",
    ]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": ""},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_a_body_of_another_type_is_415(headers: dict[str, str]) -> None:
    response = serve(
        make_service(), lambda client: client.post("/v1/completions", content=b"{}", headers=headers)
    )

    assert response.status_code == 415
    error_of(response)


def test_a_bug_is_a_500_that_tells_nothing_of_itself() -> None:
    response = post(COMPLETION, service=make_service(FakeEngine(error=ValueError("secret"))))

    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["type"] == "server_error"


def test_without_a_replica_requests_are_503_and_may_come_back() -> None:
    service = make_service(cluster=FakeCluster(num_ready=0))

    response = post(COMPLETION, service=service)

    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert get("/health", service).status_code == 200
    assert get("/ready", service).json() == {
        "status": "starting",
        "replicas_ready": 0,
        "replicas": 1,
        "min_ready_replicas": 1,
        "given_up": [],
    }
    assert get("/ready", service).status_code == 503


def test_requests_are_let_in_while_a_replica_is_coming_back() -> None:
    service = make_service(cluster=FakeCluster(num_ready=0, is_coming_back=True))

    assert post(COMPLETION, service=service).json()["choices"][0]["text"] == ANSWER
    assert get("/ready", service).status_code == 503


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("error", [None, ReplicaLostError("no replica became ready in time")])
def test_a_stream_whose_first_piece_is_long_in_coming_says_that_it_lives(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], error: Exception | None
) -> None:
    monkeypatch.setattr("phalanx.launch.server.routes.QUIET_S", 0.01)
    monkeypatch.setattr("phalanx.launch.server.sse.QUIET_S", 0.01)
    engine = FakeEngine(is_blocked=True, error=error)

    async def run() -> bytes:
        said_so = asyncio.Event()

        def look(message: Any) -> None:
            if message.get("body") == b": waiting\n\n":
                said_so.set()

        asking = asyncio.create_task(
            call(
                make_service(engine),
                {**body, "stream": True},
                leave=asyncio.Event(),
                path=path,
                on_message=look,
            )
        )
        await said_so.wait()
        engine.release.set()
        return b"".join(message.get("body", b"") for message in await asking)

    text = asyncio.run(asyncio.wait_for(run(), 10)).decode()

    assert text.endswith("data: [DONE]\n\n")
    if error is None:
        pieces = re.findall(r'"(?:text|content)":"([^"]*)"', text)
        assert "".join(pieces) == ANSWER
    else:
        assert '"code":"replica_lost"' in text
    assert engine.num_running == 0


def test_openais_client_raises_its_own_errors() -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        with_openai(
            make_service(), lambda client: client.completions.create(**{**COMPLETION, "model": "other"})
        )
    with pytest.raises(openai.BadRequestError) as caught:
        with_openai(
            make_service(), lambda client: client.completions.create(**{**COMPLETION, "max_tokens": 0})
        )
    assert caught.value.param == "max_tokens"
    service = make_service(FakeEngine(error=QueueFullError(1.0)))
    with pytest.raises(openai.RateLimitError):
        with_openai(service, lambda client: client.completions.create(**COMPLETION))


# The key


def test_a_key_guards_the_api_and_not_health() -> None:
    service = make_service(api_key="sesame")

    assert get("/v1/models", service).status_code == 401
    assert get("/v1/models", service, Authorization="Bearer open").status_code == 401
    assert get("/v1/models", service, Authorization="Bearer sesame").status_code == 200
    assert post({"prompt": "a"}, "/tokenize", service).status_code == 401
    assert error_of(get("/v1/nothing", service))["code"] == "invalid_api_key"
    assert [get(path, service).status_code for path in ("/health", "/ready", "/metrics", "/version")] == [
        200
    ] * 4
    with pytest.raises(openai.AuthenticationError):
        with_openai(service, lambda client: client.models.list(), key="open")


# Other routes


def test_models_are_listed_and_found() -> None:
    listed = with_openai(make_service(), lambda client: client.models.list())
    found = with_openai(make_service(), lambda client: client.models.retrieve("tiny"))

    assert [model.id for model in listed.data] == ["tiny"]
    assert (found.id, found.owned_by, found.max_model_len) == ("tiny", "phalanx", 64)


def test_text_becomes_tokens_and_tokens_text() -> None:
    made = post({"prompt": "ab", "return_token_strs": True}, "/tokenize").json()
    chat = post({"messages": CHAT["messages"]}, "/tokenize").json()
    back = post({"tokens": [97, 98]}, "/detokenize").json()

    assert made == {"count": 2, "max_model_len": 64, "tokens": [97, 98], "token_strs": ["a", "b"]}
    assert bytes(chat["tokens"]) == b"user:Hi\nA:"
    assert back == {"prompt": "ab"}
    assert error_of(post({"tokens": [256]}, "/detokenize"))["param"] == "tokens"
    long = "a" * 40_000
    assert error_of(post({"prompt": long}, "/tokenize"))["param"] == "prompt"
    assert (
        error_of(post({"messages": [{"role": "user", "content": long}]}, "/tokenize"))["param"] == "messages"
    )
    assert post({"tokens": [97] * 20_000}, "/detokenize").json() == {"prompt": "a" * 20_000}
    many = post({"prompt": "a" * 20_000, "return_token_strs": True}, "/tokenize").json()
    assert many["token_strs"] == ["a"] * many["count"]
    assert post({}, "/tokenize").status_code == 400


def test_metrics_count_requests_tokens_and_replicas() -> None:
    cluster = FakeCluster(stats={0: make_stats(num_running=3, prefix_hit_tokens=5)})
    service = make_service(cluster=cluster)

    async def work(client: httpx.AsyncClient) -> str:
        await client.post("/v1/completions", json=COMPLETION)
        await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 0})
        return (await client.get("/metrics")).text

    text = serve(service, work)

    for line in (
        'phalanx_requests_total{model_name="tiny",route="/v1/completions",status="200"} 1.0',
        'phalanx_requests_total{model_name="tiny",route="/v1/completions",status="400"} 1.0',
        'phalanx_generation_tokens_total{model_name="tiny"} 13.0',
        'phalanx_prompt_tokens_total{model_name="tiny"} 6.0',
        'phalanx_time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'phalanx_e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
        'phalanx_num_requests_running{dp_rank="0",model_name="tiny"} 3.0',
        'phalanx_prefix_cache_hit_tokens_total{dp_rank="0",model_name="tiny"} 5.0',
        'phalanx_replicas_ready{model_name="tiny"} 1.0',
    ):
        assert line in text, line


# Clients that leave, and servers that stop


async def call(
    service: Service,
    body: dict[str, Any],
    *,
    leave: asyncio.Event,
    path: str = "/v1/completions",
    on_message: Callable[[Any], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """Send one request by hand; the client leaves when `leave` is set. Returns what was sent to it."""
    sent: list[dict[str, Any]] = []
    arrived = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if arrived:
            return arrived.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        on_message(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("test", 1),
        "server": ("test", 80),
    }
    await create_app(service)(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_client_that_leaves_aborts_its_request(stream: bool, prompt: Any) -> None:
    async def run() -> None:
        engine = FakeEngine(is_blocked=True)
        service = make_service(engine)
        leave = asyncio.Event()
        task = asyncio.create_task(
            call(service, {**COMPLETION, "prompt": prompt, "stream": stream}, leave=leave)
        )
        await engine.entered.wait()

        leave.set()
        await task

        assert engine.num_running == 0
        assert engine.aborted.is_set()
        assert service.gate.num_inside == 0
        assert b'status="499"} 1.0' in service.metrics.render()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_client_that_leaves_within_a_stream_aborts_its_request() -> None:
    class Stalling(FakeEngine):
        async def generate(self, *arguments: Any, **named: Any) -> Any:
            async for output in FakeEngine.generate(self, *arguments, **named):
                yield output
                self.entered.set()
                await self.release.wait()

    async def run() -> None:
        engine = Stalling()
        service = make_service(engine)
        leave = asyncio.Event()
        task = asyncio.create_task(call(service, {**COMPLETION, "stream": True}, leave=leave))
        await engine.entered.wait()

        leave.set()
        sent = await task

        assert sent[0]["status"] == 200
        assert b"[DONE]" not in b"".join(message.get("body", b"") for message in sent)
        assert b'status="499"} 1.0' in service.metrics.render()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_draining_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async def run() -> None:
        engine = FakeEngine(is_blocked=True)
        service = make_service(engine)
        async with client_of(service) as client:
            running = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            await engine.entered.wait()
            drained = asyncio.create_task(service.gate.drain(30.0))
            while not service.gate.is_draining:
                await asyncio.sleep(0)

            refused = await client.post("/v1/completions", json=COMPLETION)
            ready = await client.get("/ready")
            engine.release.set()

            assert (refused.status_code, error_of(refused)["code"]) == (503, "server_stopping")
            assert (ready.status_code, ready.json()["status"]) == (503, "draining")
            assert (await running).json()["choices"][0]["text"] == ANSWER
            assert await drained

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize("stream", [False, True])
def test_what_runs_longer_than_the_drain_budget_is_aborted(stream: bool) -> None:
    async def run() -> None:
        engine = FakeEngine(is_blocked=True)
        service = make_service(engine)
        async with client_of(service) as client:
            running = asyncio.create_task(
                client.post("/v1/completions", json={**COMPLETION, "stream": stream})
            )
            await engine.entered.wait()

            assert not await service.gate.drain(0.0)

            assert (await running).status_code == 503
            assert engine.num_running == 0

    asyncio.run(asyncio.wait_for(run(), 10))


# Whatever comes

FIELDS = [
    *COMPLETION,
    *CHAT,
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "n",
    "stream",
    "stream_options",
    "echo",
]
FIELDS += [
    "logprobs",
    "logit_bias",
    "top_logprobs",
    "prompt_logprobs",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "min_tokens",
    "stop_token_ids",
    "tools",
    "response_format",
    "content",
    "role",
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**63, 10**30])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    base=st.sampled_from([COMPLETION, CHAT, {}]),
    change=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    whole=st.none() | VALUES,
)
def test_no_body_makes_a_server_error(
    path: str, base: dict[str, Any], change: dict[str, Any], whole: Any
) -> None:
    body = {**base, **change} if whole is None else whole
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}

    response = serve(make_service(), lambda client: client.post(path, content=content, headers=headers))

    assert 200 <= response.status_code < 500, (body, response.text)
    if response.status_code >= 400:
        error_of(response)
