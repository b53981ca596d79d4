"""Log-probabilities and the parameters of the sampler in the OpenAI API, over a small engine."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from phalanx.engine.detokenizer import Detokenizer
from phalanx.engine.logprobs import Logprob, LogprobReader
from phalanx.engine.token_text import TokenTexts
from phalanx.engine.tokenizer import Tokenizer, load_tokenizer
from phalanx.launch.server.app import create_app
from phalanx.launch.server.logprobs import CompletionLogprobsWriter, chat_logprobs
from phalanx.launch.server.service import Service
from phalanx.workers.logprobs import pack_table
from support.server import ANSWER, FakeEngine, LetterCodec, make_service
from support.tokenizers import build_byte_level, build_metaspace

COMPLETION = {"model": "tiny", "prompt": "Say", "max_tokens": 20}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}


async def ask(kind: str, body: dict[str, Any], service: Service | None = None) -> Any:
    """Ask through OpenAI's own client, which checks the types of what it reads."""
    transport = httpx.ASGITransport(app=create_app(service or make_service()), raise_app_exceptions=True)
    http = httpx.AsyncClient(transport=transport, base_url="http://test")
    async with openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http) as client:
        create = client.completions.create if kind == "completions" else client.chat.completions.create
        answer = await create(**body)
        return [chunk async for chunk in answer] if body.get("stream") else answer


def run(kind: str, body: dict[str, Any], service: Service | None = None) -> Any:
    return asyncio.run(ask(kind, body, service))


def test_a_completion_tells_of_each_token() -> None:
    logprobs = run("completions", {**COMPLETION, "logprobs": 2}).choices[0].logprobs

    assert logprobs.tokens == list(ANSWER)
    assert logprobs.token_logprobs == [-1.0] * len(ANSWER)
    assert logprobs.text_offset == list(range(len(ANSWER)))
    assert logprobs.top_logprobs[0] == {"H": -1.0, "I": -2.0, "J": -9999.0}


@pytest.mark.parametrize("n", [1, 2])
def test_an_echoed_prompt_is_told_of_first_whole_and_streamed(n: int) -> None:
    body = {**COMPLETION, "logprobs": 1, "echo": True, "n": n, "prompt": ["Say", "it"]}
    whole = run("completions", body).choices
    chunks = run("completions", {**body, "stream": True})

    assert len(whole) == 2 * n
    for choice in whole:
        echo = ["Say", "it"][choice.index // n]
        logprobs = choice.logprobs
        assert choice.text == echo + ANSWER
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.token_logprobs == [None, *[-1.0] * (len(choice.text) - 1)]
        assert logprobs.top_logprobs[0] is None
        assert logprobs.text_offset == list(range(len(choice.text)))
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [entry for chunk in own for entry in getattr(chunk.logprobs, name)]
            assert parts == getattr(logprobs, name)


class SpecialCodec(LetterCodec):
    """Token 1 is special."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "<s>"
        return "".join(special if token_id == 1 else chr(token_id) for token_id in token_ids)


@pytest.mark.parametrize("max_tokens", [20, 0])
@pytest.mark.parametrize("n", [1, 2])
def test_an_echoed_prompt_without_any_text_is_told_of_as_well(n: int, max_tokens: int) -> None:
    body = {**COMPLETION, "logprobs": 1, "echo": True, "n": n, "prompt": [1], "max_tokens": max_tokens}
    service = make_service(codec=SpecialCodec())
    whole = run("completions", body, service).choices
    chunks = run("completions", {**body, "stream": True}, service)

    text = ANSWER if max_tokens else ""
    for choice in whole:
        logprobs = choice.logprobs
        assert choice.text == text
        assert logprobs.tokens == ["<s>", *text]
        assert logprobs.token_logprobs == [None, *[-1.0] * len(text)]
        assert logprobs.text_offset == [0, *range(len(text))]
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [entry for chunk in own if chunk.logprobs for entry in getattr(chunk.logprobs, name)]
            assert parts == getattr(logprobs, name)


def test_a_prompt_is_scored_and_nothing_written() -> None:
    answer = run("completions", {**COMPLETION, "echo": True, "logprobs": 1, "max_tokens": 0})

    assert answer.choices[0].text == "Say"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.tokens == list("Say")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_a_chat_tells_of_each_token_whole_and_streamed(num_top: int | None) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": num_top}
    content = run("chat", body).choices[0].logprobs.content
    chunks = [chunk.choices[0] for chunk in run("chat", {**body, "stream": True})]

    assert [entry.token for entry in content] == list(ANSWER)
    assert [bytes(entry.bytes).decode() for entry in content] == list(ANSWER)
    assert {len(entry.top_logprobs) for entry in content} == {num_top or 0}
    assert [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content] == content
    assert run("chat", CHAT).choices[0].logprobs is None


@pytest.mark.parametrize(("kind", "body"), [("completions", COMPLETION), ("chat", CHAT)])
def test_prompt_logprobs_are_a_field_of_their_own(kind: str, body: dict[str, Any]) -> None:
    answer = run(kind, {**body, "extra_body": {"prompt_logprobs": 1}})

    found = answer.prompt_logprobs if kind == "chat" else answer.choices[0].prompt_logprobs
    assert len(found) == answer.usage.prompt_tokens
    assert found[0] is None
    letter = "Say"[1] if kind == "completions" else "user"[1]
    assert found[1][str(ord(letter))] == {"logprob": -1.0, "rank": 1, "decoded_token": letter}


def test_every_parameter_reaches_the_engine() -> None:
    engine = FakeEngine()
    extra = {
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "allowed_token_ids": [5, 6],
        "bad_words": ["x", "yz"],
        "truncate_prompt_tokens": 2,
        "min_tokens": 3,
        "top_k": 7,
    }
    body = {
        **COMPLETION,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -100, "8": 1000.5},
        "logprobs": 0,
        "extra_body": extra,
    }

    run("completions", body, make_service(engine))

    ((prompt, params),) = engine.asked
    assert bytes(prompt) == b"ay"
    assert (params.min_p, params.repetition_penalty, params.top_k, params.min_tokens) == (0.25, 1.5, 7, 3)
    assert (params.presence_penalty, params.frequency_penalty) == (-2, 0.5)
    assert params.logit_bias == {7: -100.0, 8: 1000.5}
    assert (params.allowed_token_ids, params.bad_words) == ((5, 6), ("x", "yz"))
    assert (params.logprobs, params.prompt_logprobs) == (0, None)


def entry(value: float, text: str, token_bytes: bytes, rank: int = 1, **fields: Any) -> Logprob:
    return Logprob(logprob=value, rank=rank, text=text, token_bytes=token_bytes, **fields)


def test_what_json_cannot_hold_and_text_cannot_show_is_written_still() -> None:
    position = {
        5: entry(float("-inf"), "", b"\xe2\x9c", rank=3),
        6: entry(-0.5, "true", b"true"),
        7: entry(-0.5, "true", b"true"),
    }

    written = CompletionLogprobsWriter().write([position])
    (chat,) = chat_logprobs([position], 2).content

    assert written.tokens == [""]
    assert written.token_logprobs == [-9999.0]
    assert written.top_logprobs == [{"bytes:\\xe2\\x9c": -9999.0, "true": -0.5, "token_id:7": -0.5}]
    assert (chat.token, chat.bytes, chat.logprob) == ("bytes:\\xe2\\x9c", [0xE2, 0x9C], -9999.0)
    assert [top.logprob for top in chat.top_logprobs] == [-0.5, -0.5]
    assert "Infinity" not in json.dumps(written.top_logprobs)


def tell(codec: Tokenizer, preceding: list[int], token_ids: list[int], **reader: bool) -> list[Any]:
    """What an engine would say of tokens, without numbers that mean anything."""
    ids = np.array([token_ids], dtype=np.int32).T
    table = pack_table(ids, np.full(ids.shape, -1.0, np.float32), np.ones(len(ids), np.int32))
    return LogprobReader(TokenTexts(codec), preceding, **reader).read(table)


def test_the_space_before_the_first_word_has_no_place_in_an_echoed_prompt(tmp_path: Path) -> None:
    codec = load_tokenizer(build_metaspace(tmp_path))
    echo = "Hello world, a fox"
    token_ids = codec.encode(echo)
    positions = tell(codec, token_ids[:1], token_ids[1:])
    writer = CompletionLogprobsWriter()

    prompt = writer.write_prompt([None, *positions], token_ids[0], codec, echo=echo)

    assert codec.bos_token_id == token_ids[0]
    assert prompt.tokens[1].startswith(" Hello")
    for token, offset in zip(prompt.tokens[2:], prompt.text_offset[2:], strict=True):
        assert echo[offset:].startswith(token)
    assert prompt.text_offset[:2] == [0, 0]
    assert writer.write([{9: entry(-1.0, "es", b"es")}]).text_offset == [len(echo)]


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize(
    "prompt", ["Hello world", "</s>Hello", "a </s> b</s></s>c", " two  spaces ", "ü first, 你好", "</s>"]
)
@pytest.mark.parametrize("build", [build_metaspace, build_byte_level])
def test_the_tokens_of_an_echoed_prompt_divide_its_text_among_them(
    build: Any, prompt: str, as_ids: bool, skips: bool, tmp_path: Path
) -> None:
    codec = load_tokenizer(build(tmp_path))
    if build is build_byte_level:
        prompt = prompt.replace("</s>", "<|im_end|>")
    token_ids = codec.encode(prompt)
    echo = codec.decode(token_ids) if as_ids else prompt
    positions = tell(codec, token_ids[:1], token_ids[1:], skips_special_tokens=skips)
    writer = CompletionLogprobsWriter(skips_special_tokens=skips)

    written = writer.write_prompt([None, *positions], token_ids[0], codec, echo=echo)

    ends = [*written.text_offset[1:], len(echo)]
    specials = [codec.id_to_token(token_id) for token_id in codec.special_ids]
    for token, start, end in zip(written.tokens, written.text_offset, ends, strict=True):
        # A space that the tokenizer has put in front, and special tokens that are not in the text, have no part of it.
        assert echo[start:end] in (token, token.removeprefix(" "), "" if token in specials else token)
    assert written.text_offset[0] == 0


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("text", ["Hello world", "  two spaces", "ü first", "</s>Hello"])
@pytest.mark.parametrize("prompt", [[1], [1] * 20, "Hello", ["Hello", *[1] * 20]])
@pytest.mark.parametrize("build", [build_metaspace, build_byte_level])
def test_offsets_are_places_in_the_text_whatever_stands_before_it(
    build: Any, prompt: Any, text: str, skips: bool, tmp_path: Path
) -> None:
    codec = load_tokenizer(build(tmp_path))
    preceding: list[int] = []
    for part in [prompt] if isinstance(prompt, str) else prompt:
        preceding += codec.encode(part, add_special_tokens=False) if isinstance(part, str) else [part]
    token_ids = codec.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(codec, preceding, skip_special_tokens=skips)
    places = []
    for token_id in token_ids:
        places.append(len(detokenizer.text))
        detokenizer.add(token_id)
    detokenizer.finish()

    positions = tell(codec, preceding, token_ids, skips_special_tokens=skips)
    written = CompletionLogprobsWriter(skips_special_tokens=skips).write(positions)

    assert written.text_offset == places
    before = codec.decode(preceding, skip_special_tokens=skips)
    whole = codec.decode([*preceding, *token_ids], skip_special_tokens=skips)
    assert before + detokenizer.text == whole


def test_special_tokens_have_no_place_in_the_text() -> None:
    positions = [{1: entry(-1.0, "<s>", b"<s>", is_special=True)}, {2: entry(-1.0, "ab", b"ab")}]

    assert CompletionLogprobsWriter().write([*positions, *positions]).text_offset == [0, 0, 2, 2]
    shown = CompletionLogprobsWriter(offset=1, skips_special_tokens=False)
    assert shown.write(positions).text_offset == [1, 4]
