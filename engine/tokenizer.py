"""Text to tokens and back, with the very ids that the model was trained on.

Called by: InputProcessor and the detokeniser, in the front end and in `LLM`. Reads tokenizer.json with the
`tokenizers` library itself: importing transformers would bring torch into a process that has no use for it.
Thread: `encode` and `decode` may be called from any thread.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as NativeTokenizer

from ..shm.errors import ConfigError
from ..workers.gguf_file import is_gguf, open_gguf
from . import gguf_tokenizer

log = logging.getLogger(__name__)

LONG_TEXT = 4096
"""Characters, or tokens. The library keeps the interpreter's lock while it works on one text, but not on a list of
them: of the longer ones, which take milliseconds to seconds, a list of one is made. Other threads run meanwhile."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Codec(Protocol):
    """What turns text into ids and ids into text."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def to_json(self) -> str | None: ...


class Tokenizer:
    """The tokenizer of one model. Made by `load_tokenizer`.

    vocab_size:      number of ids, added tokens included; the model's own may be larger (padding)
    special_tokens:  named ones as text: "bos_token", "eos_token", ... for chat templates
    special_ids:     ids whose text `skip_special_tokens` leaves out
    chat_templates:  by name; "default" is the one that is used unasked
    """

    def __init__(
        self,
        codec: Codec,
        *,
        vocab: dict[str, int],
        special_tokens: dict[str, str],
        special_ids: frozenset[int],
        chat_templates: dict[str, str],
    ) -> None:
        self._codec = codec
        self._vocab = vocab
        self._tokens_by_id = {token_id: token for token, token_id in vocab.items()}
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.special_tokens = special_tokens
        self.special_ids = special_ids
        self.chat_templates = chat_templates

    @property
    def bos_token_id(self) -> int | None:
        """Id of the begin-of-sequence token, when there is one."""
        return self._vocab.get(self.special_tokens.get("bos_token", ""))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, when there is one."""
        return self._vocab.get(self.special_tokens.get("eos_token", ""))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into ids. Rendered chats are encoded without special tokens: the template wrote them."""
        return self._codec.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text, without any clean-up of spaces. Ids outside the vocabulary give nothing."""
        return self._codec.decode(token_ids, skip_special_tokens)

    def to_json(self) -> str | None:
        """Write the whole tokenizer in the format of tokenizer.json; None when it has no such form."""
        return self._codec.to_json()

    def id_to_token(self, token_id: int) -> str | None:
        """Name one id as it stands in the vocabulary."""
        return self._tokens_by_id.get(token_id)


def no_tokenizer() -> Tokenizer:
    """A tokenizer without a vocabulary: prompts must be token ids, and no output has text.

    Its `encode` raises ConfigError (field "model").
    """
    return Tokenizer(_NoCodec(), vocab={}, special_tokens={}, special_ids=frozenset(), chat_templates={})


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a model's folder, or of a GGUF file.

    What stands around a text (bos, eos) is up to tokenizer.json alone; the `add_bos_token` flags of older
    checkpoints beside it are ignored, as transformers 5 ignores them.
    Without a tokenizer.json transformers converts what there is; that imports torch, which costs seconds.
    Raises ConfigError (field "model") when the folder holds no tokenizer that can be read.
    """
    folder = Path(folder)
    if is_gguf(folder):
        return _load_from_gguf(folder)
    config = _read_json(folder / "tokenizer_config.json")
    if not (folder / "tokenizer.json").is_file():
        return _load_with_transformers(folder, config)
    try:
        native = NativeTokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for whatever it cannot read
        raise ConfigError("model", f"cannot read {folder}/tokenizer.json: {error}") from None
    # Limits that were saved with a tokenizer are those of its training; a prompt is never cut silently.
    native.no_truncation()
    native.no_padding()
    special_tokens = _read_special_tokens(folder, config)
    _add_missing_tokens(native, config, special_tokens)
    return _wrap(native, special_tokens=special_tokens, chat_templates=_read_chat_templates(folder, config))


def _load_from_gguf(path: Path) -> Tokenizer:
    metadata = open_gguf(path).metadata
    native = gguf_tokenizer.build_tokenizer(metadata)
    return _wrap(
        native,
        special_tokens=gguf_tokenizer.special_tokens(metadata),
        chat_templates=gguf_tokenizer.chat_templates(metadata),
    )


def _wrap(
    native: NativeTokenizer, *, special_tokens: dict[str, str], chat_templates: dict[str, str]
) -> Tokenizer:
    added = native.get_added_tokens_decoder()
    return Tokenizer(
        _NativeCodec(native),
        vocab=native.get_vocab(with_added_tokens=True),
        special_tokens=special_tokens,
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        chat_templates=chat_templates,
    )


class _NoCodec:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise ConfigError("model", "was loaded without its tokenizer; prompts must be token ids")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return ""

    def to_json(self) -> str | None:
        return None


class _NativeCodec:
    def __init__(self, native: NativeTokenizer) -> None:
        self._native = native

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int]
        if len(text) < LONG_TEXT:
            ids = self._native.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._native.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str
        if len(token_ids) < LONG_TEXT:
            text = self._native.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self._native.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def to_json(self) -> str | None:
        text: str = self._native.to_str()
        return text


class _TransformersCodec:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def to_json(self) -> str | None:
        return None


def _load_with_transformers(folder: Path, config: dict[str, Any]) -> Tokenizer:
    log.info("no tokenizer.json, converting with transformers folder=%s", folder)
    # Not at the top: it imports torch, and only a folder without tokenizer.json needs it.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # conversion fails in as many ways as there are formats
        raise ConfigError("model", f"{folder} holds no tokenizer that can be read: {error}") from None
    return Tokenizer(
        _TransformersCodec(tokenizer),
        vocab=dict(tokenizer.get_vocab()),
        special_tokens={
            name: str(value)
            for name in _NAMED_TOKENS
            if (value := getattr(tokenizer, name, None)) is not None
        },
        special_ids=frozenset(tokenizer.all_special_ids),
        chat_templates=_read_chat_templates(folder, config),
    )


def _read_special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens as text; tokenizer_config.json wins over the older special_tokens_map.json."""
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    found = {}
    for name in _NAMED_TOKENS:
        value = named.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _add_missing_tokens(
    native: NativeTokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Add tokens that only the configuration knows, in the order of their ids, as transformers does."""
    known = {token.content for token in native.get_added_tokens_decoder().values()}
    missing = []
    for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            known.add(entry["content"])
            flags = {
                key: entry[key] for key in ("lstrip", "rstrip", "normalized", "single_word") if key in entry
            }
            missing.append(AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags))
    if missing:
        native.add_tokens(missing)
    named = [text for text in dict.fromkeys(special_tokens.values()) if text not in known]
    if named:
        native.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in named])


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Read templates by name: a file wins over tokenizer_config.json, which holds one string or a list."""
    found: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        found.update({entry["name"]: entry["template"] for entry in value})
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError("model", f"cannot read {path}: {error}") from None
    return loaded if isinstance(loaded, dict) else {}
