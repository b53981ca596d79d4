"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library.

Called by: tokenizer.py for a model that is one GGUF file; the conversion of the default model. The file holds the
vocabulary and names the rest: `tokenizer.ggml.model` says which kind it is, `tokenizer.ggml.pre` how text is cut into
words first. Two kinds are known:

    gpt2    byte-level BPE with a list of merges
    llama   SentencePiece's BPE, as Llama 1 and 2, Mistral and Gemma have it: scores instead of merges, bytes for
            what no token covers, and a mark for a space
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..shm.errors import ConfigError

SPACE = "▁"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_WORDS = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
NAMED_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding"}
"""Our name of a special token, and the file's (whose spelling of separator is its own)."""


class TokenKind(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer of a file's metadata. Raises ConfigError (field "model") for a kind that is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    try:
        match kind:
            case "gpt2":
                tokenizer = _byte_level(metadata)
            case "llama":
                tokenizer = _sentence_piece(metadata)
            case _:
                raise ConfigError(
                    "model", f"the GGUF file's tokenizer is {kind!r}; only gpt2 and llama are known"
                )
        _add_special_tokens(tokenizer, metadata)
    except KeyError as error:
        raise ConfigError("model", f"the GGUF file lacks the field {error.args[0]}") from None
    return tokenizer


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens as text: "bos_token", ..."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    found = {}
    for name, key in NAMED_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            found[f"{name}_token"] = tokens[token_id]
    return found


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; "default" is the one that is used unasked."""
    prefix = "tokenizer.chat_template"
    named = {
        key.removeprefix(prefix).removeprefix("."): value
        for key, value in metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }
    return {name or "default": text for name, text in named.items()}


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    cut = metadata.get("tokenizer.ggml.pre", "default")
    # Llama 3 takes a word that is a token as it is, without asking the merges.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match cut:
        case "smollm":
            words: list[Any] = [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        case "qwen2":
            tokenizer.normalizer = normalizers.NFC()
            words = [pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"), byte_level]
        case "llama-bpe":
            words = [pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), byte_level]
        case "gpt-2":
            words = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        case _:
            raise ConfigError(
                "model",
                f"the GGUF file's tokenizer cuts text as {cut!r}; known are gpt-2, llama-bpe, qwen2, smollm",
            )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_of(vocab, metadata["tokenizer.ggml.scores"]),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", SPACE)
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_of(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Turn scores into merges: SentencePiece joins the pair whose result scores highest.

    A token may come from several pairs, each a merge of its own; all of them stand at the token's place.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[token_id], left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = list(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
    # Each call builds the search for added tokens anew: one by one, Gemma's six thousand take half a minute.
    tokenizer.add_special_tokens(
        [
            AddedToken(text, normalized=False, special=True)
            for text, kind in kinds
            if kind == TokenKind.CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text, kind in kinds if kind == TokenKind.USER_DEFINED]
    )
    is_sentence_piece = metadata["tokenizer.ggml.model"] == "llama"
    begins = metadata.get("tokenizer.ggml.add_bos_token", is_sentence_piece)
    ends = metadata.get("tokenizer.ggml.add_eos_token", False)
    around = []
    for is_added, key in ((begins, "bos"), (ends, "eos")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        around.append([(tokens[token_id], token_id)] if is_added and token_id is not None else [])
    if any(around):
        names = [[text for text, _ in part] for part in around]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*names[0], "$A", *names[1]],
            pair=[*names[0], "$A", *names[1], *names[0], "$B:1", *names[1]],
            special_tokens=[*around[0], *around[1]],
        )
