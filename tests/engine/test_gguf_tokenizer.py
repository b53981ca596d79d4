"""Tokenizers inside GGUF files against those that they were made from, and a whole model from one file."""

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import SentencePieceBPETokenizer, Tokenizer

from phalanx import LLM, SamplingParams
from phalanx.engine.tokenizer import load_tokenizer
from phalanx.launch.gguf_checkpoint import convert_gguf
from phalanx.shm.errors import ConfigError
from support.gguf_models import add_byte_level_tokenizer
from support.tiny_gguf import write_gguf
from support.tiny_models import END_OF_TEXT, LICENSE_PATH, train_tokenizer

TEXTS = [
    "The licence, as it stands.",
    "  two spaces,\n\n a line\tand 1234 digits",
    "naïve café ☃ 漢字 🙂",
    "<|im_start|>user\nhello<|im_end|>",
    "",
]


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.fixture(scope="module")
def text() -> str:
    return LICENSE_PATH.read_text(encoding="utf-8")[:6000]


@pytest.fixture(scope="module")
def trained(text: str) -> Tokenizer:
    return train_tokenizer(text, 420)


def write(path: Path, trained: Tokenizer, cut: str, **flags: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    add_byte_level_tokenizer(writer, trained, cut, **flags)
    writer.add_chat_template("{{ messages[0].content }}")
    finish(writer)
    return path


def test_a_byte_level_tokenizer_gives_the_same_ids(tmp_path: Path, trained: Tokenizer) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "t.gguf", trained, "gpt-2"))

    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == trained.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.special_tokens == {"bos_token": END_OF_TEXT, "eos_token": "<|im_end|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat_templates == {"default": "{{ messages[0].content }}"}


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ("smollm", ["don", "'t", " ", "1", "2", "3", "4", " go", "\n\n"]),
        ("qwen2", ["don", "'t", " ", "1", "2", "3", "4", " go", "\n\n"]),
        ("llama-bpe", ["don", "'t", " ", "123", "4", " go", "\n\n"]),
        ("gpt-2", ["don", "'t", " 1234", " go", "\n\n"]),
    ],
)
def test_text_is_cut_as_the_file_says(tmp_path: Path, trained: Tokenizer, cut: str, words: list[str]) -> None:
    native = load_tokenizer(write(tmp_path / "t.gguf", trained, cut))._codec._native

    pieces = native.pre_tokenizer.pre_tokenize_str("don't 1234 go\n\n")

    assert ["don't 1234 go\n\n"[start:stop] for _, (start, stop) in pieces] == words


def test_the_begin_token_is_added_when_the_file_says_so(tmp_path: Path, trained: Tokenizer) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "t.gguf", trained, "gpt-2", add_bos_token=True))

    assert tokenizer.encode("as it stands")[0] == 0
    assert tokenizer.encode("as it stands", add_special_tokens=False) == tokenizer.encode("as it stands")[1:]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_sentence_piece_tokenizer_gives_the_ids_of_its_merges(
    tmp_path: Path, text: str, has_prefix: bool
) -> None:
    trained = SentencePieceBPETokenizer(add_prefix_space=has_prefix)
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trained.train_from_iterator(
        text.splitlines(),
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        show_progress=False,
    )
    tokens = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(has_prefix)
    finish(writer)

    tokenizer = load_tokenizer(tmp_path / "t.gguf")

    for line in text.splitlines()[10:60]:
        line = " ".join(line.split())
        if line:
            assert tokenizer.encode(line, add_special_tokens=False) == trained.encode(line).ids, line
    for given in ("naïve ☃", "two  spaces", " ahead"):
        assert tokenizer.decode(tokenizer.encode(given)) == given
    assert tokenizer.encode("the")[0] == 1


@pytest.mark.parametrize(
    ("model", "cut", "message"),
    [
        ("t5", "default", "tokenizer is 't5'; only gpt2 and llama"),
        ("gpt2", "odd", "cuts text as 'odd'; known are"),
    ],
)
def test_another_kind_is_one_sentence(tmp_path: Path, model: str, cut: str, message: str) -> None:
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(["a", "aa"])
    writer.add_token_merges(["a a"])
    finish(writer)

    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path / "t.gguf")


def test_a_model_in_one_file_answers_as_its_folder_does(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "folder").mkdir()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    answers = []
    for model in ("tiny.gguf", "folder"):
        with LLM(tmp_path / model, device="cpu", num_blocks=16, num_threads=1) as llm:
            answers.append([output.outputs[0] for output in llm.generate(["ab 12", "a b"], params)])

    assert [one.token_ids for one in answers[0]] == [one.token_ids for one in answers[1]]
    assert [one.text for one in answers[0]] == [one.text for one in answers[1]]
