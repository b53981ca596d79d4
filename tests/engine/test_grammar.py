"""Grammars: what the masks allow is what the specification means, and nothing is left over at the end."""

import json
import random
import re
import subprocess
import sys
import threading
from queue import SimpleQueue

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.grammar.backend import GrammarError
from phalanx.engine.grammar.compiler_pool import MAX_STUCK_THREADS, NUM_THREADS, CompilerPool
from phalanx.engine.grammar.llguidance_backend import LLGuidanceCompiler, check_spec
from phalanx.engine.tokenizer import load_tokenizer
from phalanx.workers.sampling_params import SamplingParamsError, StructuredOutputs
from support.tokenizers import build_byte_level

PADDING = 7
"""Ids that the model has and the tokenizer does not."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(build_byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return LLGuidanceCompiler(lambda: tokenizer, vocab_size=tokenizer.vocab_size + PADDING)


def start(compiler, tokenizer, *, end_token_ids=None, **spec):
    ends = frozenset(end_token_ids if end_token_ids is not None else [tokenizer.eos_token_id])
    return compiler.compile(StructuredOutputs(**spec)).new_matcher(ends)


def allowed(matcher, vocab_size):
    words = np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32)
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]).tolist()


def walk(matcher, tokenizer, rng, *, max_tokens=400):
    """Choose among the allowed tokens at random; None when the walk did not come to an end."""
    ids = []
    for _ in range(max_tokens):
        choices = allowed(matcher, tokenizer.vocab_size + PADDING)
        assert choices, "nothing is allowed"
        # Ends are preferred, or a walk would hardly ever leave a string.
        ends = [token_id for token_id in choices if token_id == tokenizer.eos_token_id]
        token_id = ends[0] if ends and rng.random() < 0.5 else rng.choice(choices)
        assert token_id < tokenizer.vocab_size, "padding is never allowed"
        assert matcher.accept([token_id])
        if token_id == tokenizer.eos_token_id:
            return tokenizer.decode(ids)
        ids.append(token_id)
    return None


@pytest.mark.parametrize(
    "texts",
    [
        ("yes", "no"),
        ("a", "ab", "abc"),
        ("é😀", 'quo"te', "back\\slash", "new\nline", "/a/", "(b|c)", "\x01\x7f\t", "CHOICE", "<|im_end|>"),
    ],
)
def test_every_choice_can_be_reached_also_when_one_is_the_beginning_of_another(compiler, tokenizer, texts):
    seen = set()
    for seed in range(60):
        seen.add(walk(start(compiler, tokenizer, choice=texts), tokenizer, random.Random(seed)))

    assert seen == set(texts)


def test_a_choice_may_have_thousands_of_texts(compiler, tokenizer):
    texts = [f"choice number {number}" for number in range(5000)]

    for seed in range(3):
        assert walk(start(compiler, tokenizer, choice=texts), tokenizer, random.Random(seed)) in texts


@pytest.mark.parametrize("regex", [r"[ab]+c", r"[0-9]{3}-[0-9]{2}", r"(?i)x(yz)?", r"a{2,4}|b"])
def test_a_regular_expression_matches_the_whole_output(compiler, tokenizer, regex):
    for seed in range(30):
        text = walk(start(compiler, tokenizer, regex=regex), tokenizer, random.Random(seed))
        assert text is None or re.fullmatch(regex, text)


def test_json_fits_its_schema_and_json_object_is_an_object(compiler, tokenizer):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 12}, "b": {"type": "boolean"}},
        "required": ["n", "b"],
        "additionalProperties": False,
    }
    texts = [
        walk(start(compiler, tokenizer, json=json.dumps(schema)), tokenizer, random.Random(seed))
        for seed in range(40)
    ]
    for text in filter(None, texts):
        value = json.loads(text)
        assert value.keys() == {"n", "b"}
        assert 3 <= value["n"] <= 12
        assert isinstance(value["b"], bool)
    assert any(texts)
    matcher = start(compiler, tokenizer, json_object=True)
    first = {tokenizer.decode([token_id])[0] for token_id in allowed(matcher, tokenizer.vocab_size)}
    assert first == {"{"}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "integer"}, {"minimum": 5, "maximum": 30}]},
        {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "integer"}}}]},
        {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 5}},
        {"not": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 2},
        {"type": "array", "items": {"enum": [1, "x", None]}, "minItems": 1, "maxItems": 3},
        {"type": "string", "format": "ipv4"},
        {"type": "string", "format": "date"},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]+$"},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
        {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
        {"anyOf": [{"const": "a"}, {"const": {"b": [1]}}]},
        {
            "type": "object",
            "properties": {
                "a": {"$ref": "#/$defs/d"},
                "b": {"type": "array", "items": {"$ref": "#/$defs/d"}},
            },
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"d": {"enum": ["x", "y"]}},
        },
    ],
    ids=json.dumps,
)
def test_a_schema_is_kept_to_or_refused_never_kept_to_in_part(compiler, tokenizer, schema):
    """Random walks over what the masks allow: none may lead to a value that the schema does not allow."""
    spec = {"json": json.dumps(schema)}
    try:
        check_spec(StructuredOutputs(**spec))
    except GrammarError:
        return
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    texts = [walk(start(compiler, tokenizer, **spec), tokenizer, random.Random(seed)) for seed in range(40)]
    for text in filter(None, texts):
        validator.validate(json.loads(text))
    assert any(texts)


def test_after_its_end_a_grammar_allows_ends_and_nothing_else(compiler, tokenizer):
    matcher = start(compiler, tokenizer, choice=("ab",))
    a, b = tokenizer.encode("ab", add_special_tokens=False)

    # The end in the midst of what is tried: what follows it does not count, and changes nothing.
    assert matcher.probe([a, b, tokenizer.eos_token_id, a]) == 3
    assert not matcher.accept([a, b, tokenizer.eos_token_id, a])
    assert matcher.accept([a, b, tokenizer.eos_token_id])

    assert matcher.is_finished
    assert allowed(matcher, tokenizer.vocab_size) == [tokenizer.eos_token_id]


def test_an_end_token_whose_text_fits_into_a_string_is_held_back_until_the_grammar_is_complete(
    compiler, tokenizer
):
    (x,) = tokenizer.encode("X", add_special_tokens=False)
    (quote,) = tokenizer.encode('"', add_special_tokens=False)
    matcher = start(compiler, tokenizer, json='{"type": "string"}', end_token_ids=[x, tokenizer.eos_token_id])

    assert matcher.accept([quote])
    inside = allowed(matcher, tokenizer.vocab_size)
    assert x not in inside
    assert tokenizer.eos_token_id not in inside
    assert len(inside) > 5
    assert not matcher.accept([x])
    assert matcher.accept([quote])
    assert matcher.is_finished
    assert allowed(matcher, tokenizer.vocab_size) == sorted([x, tokenizer.eos_token_id])
    assert matcher.accept([x])


def test_a_refused_token_changes_nothing(compiler, tokenizer):
    matcher = start(compiler, tokenizer, choice=("abc",))
    a, b, x = tokenizer.encode("abx", add_special_tokens=False)
    before = allowed(matcher, tokenizer.vocab_size)

    assert not matcher.accept([a, x])
    assert matcher.probe([a, b, x]) == 2

    assert allowed(matcher, tokenizer.vocab_size) == before
    assert matcher.accept([a, b])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_taking_back_any_number_of_tokens_leads_back_to_the_same_masks(compiler, tokenizer, data):
    spec = data.draw(
        st.sampled_from([{"regex": "a+"}, {"json": '{"type": "string"}'}, {"choice": ("a", "ab")}])
    )
    rng = random.Random(data.draw(st.integers(0, 1000)))
    matcher = start(compiler, tokenizer, **spec)
    masks = [allowed(matcher, tokenizer.vocab_size)]
    for _ in range(6):
        token_id = rng.choice(masks[-1])
        assert matcher.accept([token_id])
        masks.append(allowed(matcher, tokenizer.vocab_size))
        if token_id == tokenizer.eos_token_id:
            break
    num_back = data.draw(st.integers(0, len(masks) - 1))

    matcher.rollback(num_back)

    assert allowed(matcher, tokenizer.vocab_size) == masks[len(masks) - 1 - num_back]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_what_the_mask_allows_is_accepted_and_nothing_else(compiler, tokenizer, seed):
    rng = random.Random(seed)
    matcher = start(compiler, tokenizer, regex=rng.choice(["[ab]{1,3}", "(cd)*e?", '"[^"]*"']))
    for _ in range(3):
        open_ids = allowed(matcher, tokenizer.vocab_size)
        for token_id in rng.sample(range(tokenizer.vocab_size), 30):
            assert matcher.probe([token_id]) == (token_id in open_ids)
        token_id = rng.choice(open_ids)
        assert matcher.accept([token_id])
        if token_id == tokenizer.eos_token_id:
            return


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"json": '{"not": {}}'}, "not"),
        ({"json": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
        ({"json": "false"}, "allow something"),
        ({"json": "{"}, "not JSON"),
        ({"json": '{"x-guidance": {"lenient": true}, "not": {}}'}, "x-guidance"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "["}, "unclosed"),
        ({"grammar": "start: foo"}, "unknown name"),
        ({"grammar": "garbage"}, "Expected token"),
        ({"json": '{"items": ' * 200 + "{}" + "}" * 200}, "recursion"),
        ({"json": '{"items": ' * 10_000 + "{}" + "}" * 10_000}, "recursion"),
        ({"json": '{"const": "\\ud800"}'}, "hex escape"),
        ({"regex": "\ud800"}, "surrogates"),
        ({"choice": ("\ud800",)}, "hex escape"),
    ],
)
def test_what_cannot_be_held_to_is_refused_in_a_sentence(spec, problem):
    with pytest.raises(GrammarError, match=problem) as raised:
        check_spec(StructuredOutputs(**spec))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "spec",
    [{}, {"choice": ("a",), "regex": "a"}, {"choice": ()}, {"choice": ("",)}, {"choice": "ab"}, {"regex": ""},
     {"grammar": "a\0b"}, {"json": "x" * (1 << 19)}, {"grammar": "x" * (1 << 17)}],
)  # fmt: skip
def test_a_specification_has_one_form_that_is_not_empty(spec):
    with pytest.raises(SamplingParamsError):
        StructuredOutputs(**spec)


DEEP = """
from queue import SimpleQueue
from phalanx.engine.grammar.compiler_pool import CompilerPool
from phalanx.engine.grammar.llguidance_backend import LLGuidanceCompiler, check_spec
from phalanx.engine.tokenizer import load_tokenizer
from phalanx.workers.sampling_params import StructuredOutputs

rules = "".join(f"r{number}: (((r{number + 1})))\\n" for number in range(2900))
defs = ",".join(f'"{number}":{{"items":{{"$ref":"#/d/{number + 1}"}}}}' for number in range(6500))
done = SimpleQueue()
pool = CompilerPool(
    LLGuidanceCompiler(lambda: load_tokenizer(PATH), vocab_size=400), lambda: done.put(1), timeout_s=60
)
for spec in (
    StructuredOutputs(grammar=f'start: r0\\n{rules}r2900: "x"'),
    StructuredOutputs(json=f'{{"$ref":"#/d/0","d":{{{defs},"6500":{{}}}}}}'),
):
    try:
        check_spec(spec)
    except Exception as error:
        print(type(error).__name__)
    pool.submit("r", 0, spec)
    done.get()
"""


def test_definitions_that_name_each_other_thousands_deep_end_no_process(tokenizer, tmp_path):
    """In a process of its own: what it would be is no exception."""
    script = f"PATH = {str(build_byte_level(tmp_path))!r}\n{DEEP}"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() in ([], ["GrammarError"]), "the schema may be too large"


def test_a_grammar_beyond_a_limit_of_the_library_says_so_and_allows_nothing_more(compiler, tokenizer):
    matcher = start(compiler, tokenizer, grammar="start: " + " | ".join(f'"a{i}"' for i in range(3000)))
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    assert matcher.problem is None
    assert allowed(matcher, tokenizer.vocab_size) == [a]

    assert not matcher.accept([a])

    assert "3001 items" in matcher.problem
    assert "\n" not in matcher.problem
    assert allowed(matcher, tokenizer.vocab_size) == [tokenizer.eos_token_id]
    assert not matcher.accept([tokenizer.eos_token_id])


def test_a_grammar_that_needs_an_end_token_where_it_cannot_end_says_so(compiler, tokenizer):
    (x,) = tokenizer.encode("X", add_special_tokens=False)
    matcher = start(compiler, tokenizer, choice=("XX",), end_token_ids=[x, tokenizer.eos_token_id])

    assert allowed(matcher, tokenizer.vocab_size + PADDING) == []
    assert not matcher.accept([x])

    assert "stop_token_ids" in matcher.problem


class OddCompiler:
    def compile(self, spec):
        if spec.regex == "refused":
            raise GrammarError("no such thing")
        if spec.regex == "crash":
            raise RuntimeError("secret state")
        return spec


def test_a_compilation_that_fails_is_that_requests_affair_alone():
    rung = []
    pool = CompilerPool(OddCompiler(), lambda: rung.append(1), timeout_s=60.0)
    for name in ("refused", "crash", "fine"):
        pool.submit(name, 3, StructuredOutputs(regex=name))
    done = {}
    while len(done) < 3:
        done |= {compiled.request_id: compiled for compiled in pool.take(5.0)}
    pool.close()

    assert done["refused"].error == "no such thing"
    assert done["crash"].error == "the grammar cannot be compiled: RuntimeError"
    assert done["fine"].error is None
    assert {compiled.attempt for compiled in done.values()} == {3}
    assert len(rung) == 3
    pool.close()


class StuckCompiler:
    """Compiles "stuck" for ever, until it is released."""

    def __init__(self):
        self.release = threading.Event()
        self.began = SimpleQueue()

    def compile(self, spec):
        if spec.regex == "stuck":
            self.began.put(1)
            assert self.release.wait(20)
        return spec


def take_one(pool):
    (compiled,) = pool.take(10.0)
    return compiled


def test_compilations_without_end_are_given_up_and_hold_up_nobody():
    now = 0.0
    compiler = StuckCompiler()
    pool = CompilerPool(compiler, lambda: None, timeout_s=5.0, clock=lambda: now)
    assert pool.next_late_at is None
    for number in range(NUM_THREADS):
        pool.submit(f"stuck{number}", 0, StructuredOutputs(regex="stuck"))
        compiler.began.get(timeout=10)
    now = 1.0
    pool.submit("in line", 0, StructuredOutputs(regex="fine"))
    assert pool.next_late_at == 5.0
    assert pool.give_up_late(4.9) == []

    late = pool.give_up_late(5.0)

    assert [one.request_id for one in late] == ["stuck0", "stuck1"]
    assert all("structured_outputs" in one.error and not one.is_overload for one in late)
    assert take_one(pool).request_id == "in line"
    assert pool.next_late_at is None
    compiler.release.set()
    pool.submit("later", 0, StructuredOutputs(regex="fine"))
    assert take_one(pool).request_id == "later", "what was given up is never told"
    pool.close()


def test_what_nobody_waits_for_any_more_is_not_begun():
    compiler = StuckCompiler()
    pool = CompilerPool(compiler, lambda: None, timeout_s=5.0)
    for number in range(NUM_THREADS):
        pool.submit(f"busy{number}", 0, StructuredOutputs(regex="stuck"))
        compiler.began.get(timeout=10)
    for number in range(3):
        pool.submit(f"left{number}", 0, StructuredOutputs(regex="stuck"))
    pool.submit("wanted", 0, StructuredOutputs(regex="fine"))

    pool.forget(["left0", "left1", "left2", "busy0", "unknown"])
    compiler.release.set()

    outcomes = []
    while len(outcomes) < NUM_THREADS + 1:
        outcomes += [one.request_id for one in pool.take(10.0)]
    assert sorted(outcomes) == ["busy0", "busy1", "wanted"]
    pool.close()
    assert compiler.began.empty()
    assert pool.take() == []


def test_when_all_threads_are_stuck_those_in_line_may_come_again_and_the_pool_recovers():
    now = 0.0
    compiler = StuckCompiler()
    pool = CompilerPool(compiler, lambda: None, timeout_s=5.0, clock=lambda: now)
    num_threads = NUM_THREADS + MAX_STUCK_THREADS
    for number in range(num_threads):
        pool.submit(f"r{number}", 0, StructuredOutputs(regex="stuck"))
        compiler.began.get(timeout=10)
        now += 5.0
        (late,) = pool.give_up_late(now)
        assert not late.is_overload
    pool.submit("one too many", 0, StructuredOutputs(regex="fine"))
    now += 5.0

    (late,) = pool.give_up_late(now)

    assert late.is_overload
    compiler.release.set()
    pool.submit("after all", 0, StructuredOutputs(regex="fine"))
    assert take_one(pool).request_id == "after all"
    pool.close()
