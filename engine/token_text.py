"""The text of single tokens, for log-probabilities: exact bytes, and what each adds to the text before it.

Called by: logprobs.py, in the front end. A tokenizer decodes sequences; a token alone loses a leading space there, or
is a part of a character. The bytes of a token are found from its name in the vocabulary where its text does not say
them. Texts of one sequence, put together, are its text.
"""

import codecs
import re
from collections.abc import Sequence

from .tokenizer import Tokenizer

MAX_BYTES_OF_CHARACTER = 4
_SPACE_NAME = "▁"
_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")
_MARK = "\ufffd"


def byte_alphabet() -> dict[str, int]:
    """Which letter stands for which byte in byte-level vocabularies (GPT-2): printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_ALPHABET = byte_alphabet()


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        """Exact bytes of one token; none for an id that the tokenizer does not know."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def is_special(self, token_id: int) -> bool:
        """True for tokens that are not text, as `skip_special_tokens` has it."""
        return token_id in self._tokenizer.special_ids

    def loses_space(self, token_id: int) -> bool:
        """True for a token that begins with a space which is dropped where a text begins with it."""
        text = self.bytes_of(token_id)
        return text.startswith(b" ") and self._tokenizer.decode(
            [token_id], skip_special_tokens=False
        ).encode() == text.removeprefix(b" ")

    def add(self, pending: bytes, token_id: int) -> tuple[str, bytes]:
        """Let a token follow a text that ends with the bytes `pending` of an unfinished character.

        Returns what the token adds to the text, and what is pending after it.
        """
        self._decoder.setstate((pending, 0))
        text = self._decoder.decode(self.bytes_of(token_id))
        return text, self._decoder.getstate()[0]

    def pending_after(self, token_ids: Sequence[int]) -> bytes:
        """Bytes of a character that a sequence ends with and does not finish."""
        pending = b""
        for token_id in token_ids[-MAX_BYTES_OF_CHARACTER:]:
            _, pending = self.add(pending, token_id)
        return pending

    def _find_bytes(self, token_id: int) -> bytes:
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if token_id in self._tokenizer.special_ids:
            return name.encode()
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if _MARK not in text:
            # Of the spaces that a token begins with, a decoder drops the first.
            spaced = name.replace(_SPACE_NAME, " ")
            return (spaced if spaced.lstrip(" ") == text.lstrip(" ") else text).encode()
        if byte := _BYTE_NAME.fullmatch(name):
            return bytes([int(byte.group(1), 16)])
        if all(letter in _ALPHABET for letter in name):
            return bytes(_ALPHABET[letter] for letter in name)
        return text.encode()
