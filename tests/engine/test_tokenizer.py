"""Ids are those of transformers; so is the rendered chat."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from phalanx.engine.chat_template import ChatTemplate
from phalanx.engine.errors import InvalidRequestError
from phalanx.engine.tokenizer import LONG_TEXT, load_tokenizer
from phalanx.shm.errors import ConfigError
from support.launch import TINY_MODEL
from support.tokenizers import build_byte_level, build_metaspace

TEXTS = ["Hello world", " leading", "你好 🌶", "", "a<|im_end|>b</s>c", "new\nline\t tab  two"]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '你好 <b>"quoted"</b>'},
    {"role": "assistant", "content": "ok", "tool_calls": None},
    {"role": "user", "content": "bye"},
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_EVERYTHING = """{{ bos_token }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if loop.index0 > 2 %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.tool_calls is defined %}TOOLS{% endif %}
    [{{ message | tojson }}]
    {% generation %}{{ message.content | trim }}{% endgeneration %}
{%- endfor %}
{{ ns.count }}{{ tools is none }}{{ thinking | default('no') }}"""


@pytest.fixture(scope="module")
def auto_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained


@pytest.mark.parametrize("build", [build_byte_level, build_metaspace])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {
            "add_bos_token": True,
            "add_eos_token": True,
            "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        },
        {
            "added_tokens_decoder": {"999": {"content": "<|extra|>", "special": True}},
            "pad_token": "<pad>",
        },
    ],
)
def test_ids_and_texts_are_those_of_transformers(build, config, tmp_path, auto_tokenizer):
    folder = build(tmp_path, **config)
    reference = auto_tokenizer(str(folder))

    tokenizer = load_tokenizer(folder)

    for text in [*TEXTS, "x<|extra|>y<pad>"]:
        for add_special_tokens in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            assert ids == reference.encode(text, add_special_tokens=add_special_tokens), text
            for skip in (True, False):
                expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.special_ids == set(reference.all_special_ids) | tokenizer.special_ids


def test_a_folder_without_tokenizer_says_so(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)

    assert caught.value.field == "model"


def test_loading_a_tokenizer_does_not_import_torch(tmp_path):
    folder = build_byte_level(tmp_path)
    code = (
        "import sys; from phalanx.engine.tokenizer import LONG_TEXT, load_tokenizer; "
        f"load_tokenizer({str(folder)!r}).encode('hi'); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("template", [CHATML, WITH_EVERYTHING])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_rendered_chat_is_that_of_transformers(template, add_generation_prompt, tmp_path, auto_tokenizer):
    folder = build_byte_level(tmp_path, chat_template=template)
    reference = auto_tokenizer(str(folder))
    tokenizer = load_tokenizer(folder)

    rendered = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens).render(
        MESSAGES, add_generation_prompt=add_generation_prompt, thinking="yes"
    )

    messages = [{key: value for key, value in message.items() if value is not None} for message in MESSAGES]
    assert rendered == reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, thinking="yes"
    )


def test_a_template_in_a_file_wins_and_named_ones_are_found(tmp_path):
    folder = build_byte_level(
        tmp_path,
        chat_template=[{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools!"}],
    )
    (folder / "chat_template.jinja").write_text("new", encoding="utf-8")
    tokenizer = load_tokenizer(folder)

    template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)

    assert template.render(MESSAGES) == "new"
    assert template.render(MESSAGES, tools=[{"name": "f"}]) == "tools!"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(_x=1) %}",
        "{% for %}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_a_template_that_fails_is_the_request_s_fault(source):
    template = ChatTemplate({"default": source}, {})

    with pytest.raises(InvalidRequestError) as caught:
        template.render(MESSAGES)

    assert caught.value.field == "messages"


def test_a_model_without_template_and_a_chat_without_messages_are_refused():
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate({}, {}).render(MESSAGES)
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        ChatTemplate({"default": "x"}, {}).render([])


def test_a_broken_file_names_itself(tmp_path):
    folder = build_byte_level(tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps({"model": 1}), encoding="utf-8")

    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


def test_long_texts_are_the_same_tokens_and_let_other_threads_run() -> None:
    tokenizer = load_tokenizer(TINY_MODEL)
    line = "Licensed under the Apache License, Version 2.0.\n"
    text = line * (100_000 // len(line))
    num_rounds = 0
    is_over = False

    def count() -> None:
        nonlocal num_rounds
        while not is_over:
            num_rounds += 1
            time.sleep(0)

    def rounds_during(work: Callable[[], object]) -> int:
        # Whoever has just got the interpreter's lock is asked for it only after some milliseconds: what is counted
        # here was counted because it was given away.
        time.sleep(0)
        before = num_rounds
        work()
        return num_rounds - before

    counting = threading.Thread(target=count)
    counting.start()
    try:
        ids = tokenizer.encode(text)
        assert any(rounds_during(lambda: tokenizer.encode(text)) > 20 for _ in range(5))
        assert any(rounds_during(lambda: tokenizer.decode(ids)) > 10 for _ in range(20))
    finally:
        is_over = True
        counting.join()
    assert tokenizer.decode(ids) == text
    # Each line begins anew for this tokenizer, so its pieces are those of the whole.
    short = line * (LONG_TEXT // len(line))
    assert tokenizer.encode(short) + tokenizer.encode(line, add_special_tokens=False) == tokenizer.encode(
        short + line
    )
