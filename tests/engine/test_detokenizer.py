"""Text of an output: whole characters, no prompt, and the first stop string that completes."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.engine.detokenizer import Detokenizer, IncrementalDecoder, StopChecker
from phalanx.engine.tokenizer import load_tokenizer
from support.tokenizers import build_byte_level, build_metaspace


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return load_tokenizer(build_byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    return load_tokenizer(build_metaspace(tmp_path_factory.mktemp("metaspace")))


def bytes_to_ids(tokenizer, data):
    """One token per byte, in either layout."""
    letters = {}
    for byte in range(256):
        name = f"<0x{byte:02X}>"
        letters[byte] = tokenizer._vocab.get(name)
    if letters[0] is None:
        keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
        letters = {byte: tokenizer._vocab[chr(byte)] for byte in keep}
        others = [byte for byte in range(256) if byte not in keep]
        letters |= {byte: tokenizer._vocab[chr(256 + i)] for i, byte in enumerate(others)}
    return [letters[byte] for byte in data]


def decode_all(tokenizer, prompt, ids, *, skip_special_tokens=True):
    decoder = IncrementalDecoder(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    pieces = [decoder.add(token_id) for token_id in ids]
    return [*pieces, decoder.flush()]


@pytest.mark.parametrize("layout", ["byte_level", "metaspace"])
@pytest.mark.parametrize("text", ["🌶🔥", "你好世界", "naïve café", "a🌶b", "Grüße"])
def test_a_character_is_shown_whole_or_not_at_all(layout, text, request):
    tokenizer = request.getfixturevalue(layout)
    prompt = tokenizer.encode("Hello world,")

    pieces = decode_all(tokenizer, prompt, bytes_to_ids(tokenizer, text.encode()))

    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("layout", ["byte_level", "metaspace"])
@pytest.mark.parametrize("before", ["Hello world ", "你"])
def test_a_prompt_that_ends_inside_a_character_is_not_shown(layout, before, request):
    tokenizer = request.getfixturevalue(layout)
    pepper = bytes_to_ids(tokenizer, "🌶".encode())
    before_ids = bytes_to_ids(tokenizer, before.encode())

    completed = decode_all(tokenizer, before_ids + pepper[:2], pepper[2:])
    broken = decode_all(tokenizer, before_ids + pepper[:2], tokenizer.encode("ok", add_special_tokens=False))

    assert "".join(completed) == "🌶"
    assert "Hello" not in "".join(broken)
    assert "你" not in "".join(broken)
    assert "".join(broken).endswith("ok")


def test_a_genuine_replacement_character_is_not_held_for_ever(byte_level):
    mark = bytes_to_ids(byte_level, "\ufffd".encode())
    specials = [0, 1, 2] * 3
    decoder = IncrementalDecoder(byte_level, [], skip_special_tokens=True)

    pieces = [decoder.add(token_id) for token_id in mark * 5]

    assert "".join(pieces).count("\ufffd") >= 2
    assert "".join(decoder.add(token_id) for token_id in specials) == ""


def test_a_long_run_of_broken_bytes_does_not_slow_down(byte_level):
    ids = bytes_to_ids(byte_level, b"\xff") * 300
    decoder = IncrementalDecoder(byte_level, [], skip_special_tokens=True)

    pieces = [decoder.add(token_id) for token_id in ids]

    assert len(decoder._window) <= 65
    assert "".join([*pieces, decoder.flush()]) == "\ufffd" * 300


def test_the_first_word_keeps_its_space_after_a_prompt(metaspace):
    prompt = metaspace.encode("Hello")

    pieces = decode_all(metaspace, prompt, metaspace.encode("world", add_special_tokens=False))

    assert "".join(pieces) == " world"


def test_special_tokens_are_shown_only_when_asked(byte_level):
    ids = [1, *byte_level.encode("user"), 2]

    hidden = decode_all(byte_level, [], ids)
    shown = decode_all(byte_level, [], ids, skip_special_tokens=False)

    assert "".join(hidden) == "user"
    assert "".join(shown) == "<|im_start|>user<|im_end|>"


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=60), skip=st.booleans())
@example(ids=[3, 255, 200, 4], skip=True)
def test_pieces_add_up_to_the_whole_text_of_any_tokens(byte_level, ids, skip):
    pieces = decode_all(byte_level, [], ids, skip_special_tokens=skip)

    assert "".join(pieces) == byte_level.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab é你🌶 STOP,"), max_size=40))
def test_pieces_add_up_to_the_whole_text_with_byte_fallback(metaspace, text):
    prompt = metaspace.encode("Hello")
    ids = metaspace.encode("Hello" + text)
    if ids[: len(prompt)] != prompt:
        return

    assert "".join(decode_all(metaspace, prompt, ids[len(prompt) :])) == text


def stop_oracle(pieces, stops, include=False, min_tokens=0):
    s = ""
    for i, piece in enumerate(pieces):
        for ch in piece:
            s += ch
            if i + 1 <= min_tokens:
                continue
            for stop in stops:
                if s.endswith(stop):
                    return (s if include else s[: -len(stop)]), i + 1, stop
    return s, len(pieces), None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_the_match_that_completes_first_wins(pieces, stops, include, min_tokens):
    checker = StopChecker(stops, include_stop=include, min_tokens=min_tokens)
    text, num_tokens, stop = "", 0, None
    for piece in pieces:
        text += piece
        num_tokens += 1
        match = checker.find(text, len(piece), num_tokens)
        if match is not None:
            text, stop = text[: match.text_length], match.stop
            break

    assert (text, num_tokens, stop) == stop_oracle(pieces, stops, include, min_tokens)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(3, 399), max_size=40),
    stops=st.lists(st.sampled_from(["st", "stop", " a", "e", "or", "the "]), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_shown_text_only_grows_and_ends_at_the_stop(byte_level, ids, stops, include, min_tokens):
    detokenizer = Detokenizer(byte_level, [], stops=stops, include_stop=include, min_tokens=min_tokens)
    pieces = decode_all(byte_level, [], ids)
    shown, stop, count = "", None, 0
    for token_id in ids:
        count += 1
        stop = detokenizer.add(token_id)
        assert detokenizer.text.startswith(shown)
        shown = detokenizer.text
        if stop is not None:
            break
    if stop is None:
        stop = detokenizer.finish()
    assert detokenizer.text.startswith(shown)

    if "\ufffd" not in "".join(pieces):
        expected, expected_count, expected_stop = stop_oracle(pieces[:-1], stops, include, min_tokens)
        assert (detokenizer.text, count, stop) == (expected, expected_count if ids else 0, expected_stop)


def test_a_stop_string_inside_one_token_ends_the_text_before_it(byte_level):
    ids = byte_level.encode(" stopping")

    detokenizer = Detokenizer(byte_level, [], stops=["topp"])
    found = [detokenizer.add(token_id) for token_id in ids]

    assert "topp" in found
    assert detokenizer.text == " s"


def test_a_stop_token_counts_but_its_text_is_shown_only_with_stop_strings(byte_level):
    ids = byte_level.encode("Hello")
    hidden = Detokenizer(byte_level, [], skip_special_tokens=False)
    shown = Detokenizer(byte_level, [], skip_special_tokens=False, include_stop=True)
    for detokenizer in (hidden, shown):
        for token_id in ids:
            detokenizer.add(token_id)
        detokenizer.finish(last_token_id=2)

    assert hidden.text == "Hello"
    assert shown.text == "Hello<|im_end|>"
