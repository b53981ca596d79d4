"""Log-probabilities in the words of the OpenAI API, for completions and for chats, whole or in pieces.

Called by: answers.py. JSON has no infinity: what could not be is written as -9999.
"""

from collections.abc import Sequence

from ...engine.logprobs import Logprob, PositionLogprobs
from .protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from .service import TextCodec

LOWEST = -9999.0


def number(entry: Logprob) -> float:
    """The value as JSON can hold it."""
    return max(entry.logprob, LOWEST)


def name(entry: Logprob) -> str:
    """The text of a token; its bytes in OpenAI's way where they are a part of a character."""
    if entry.text or not entry.token_bytes:
        return entry.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)


def chat_logprobs(positions: Sequence[PositionLogprobs], num_top: int) -> ChatLogprobs:
    """Tokens of a message, each with the `num_top` likeliest; -1: all."""
    content = []
    for position in positions:
        entries = sorted(position.values(), key=lambda entry: entry.rank)
        own = next(iter(position.values()))
        content.append(
            TokenLogprob(
                token=name(own),
                logprob=number(own),
                bytes=list(own.token_bytes),
                top_logprobs=[
                    TopLogprob(token=name(entry), logprob=number(entry), bytes=list(entry.token_bytes))
                    for entry in entries[: len(entries) if num_top < 0 else num_top]
                ],
            )
        )
    return ChatLogprobs(content=content)


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    """Tokens of a prompt, by their ids."""
    return [
        None
        if position is None
        else {
            str(token_id): PromptLogprob(logprob=number(entry), rank=entry.rank, decoded_token=name(entry))
            for token_id, entry in position.items()
        }
        for position in positions
    ]


class CompletionLogprobsWriter:
    """The lists of one choice, piece by piece: the offsets run on.

    offset:               characters of the text before the first token that comes
    skips_special_tokens: they stand in the lists, and have no place in the text
    """

    def __init__(self, *, offset: int = 0, skips_special_tokens: bool = True) -> None:
        self._offset = offset
        self._skips_special_tokens = skips_special_tokens

    def write(self, positions: Sequence[PositionLogprobs]) -> CompletionLogprobs:
        """Take the next tokens."""
        tokens, values, tops, offsets = [], [], [], []
        for position in positions:
            own = _own(position)
            tokens.append(own.text)
            values.append(number(own))
            tops.append(_by_name(position))
            offsets.append(self._offset)
            if not self._is_skipped(own):
                self._offset += len(own.text) - own.loses_space
        return CompletionLogprobs(
            tokens=tokens, token_logprobs=[*values], top_logprobs=[*tops], text_offset=offsets
        )

    def write_prompt(
        self,
        positions: Sequence[PositionLogprobs | None],
        first_token_id: int,
        codec: TextCodec,
        *,
        echo: str,
    ) -> CompletionLogprobs:
        """Take an echoed prompt, whose text is `echo`. Nothing is known of its first token but its text."""
        first = codec.decode([first_token_id], skip_special_tokens=False)
        is_special = first != "" and codec.decode([first_token_id]) == ""
        known = [position for position in positions if position is not None]
        offsets, end = [0], _length_in(echo, 0, first, is_special=is_special)
        for own in map(_own, known):
            offsets.append(min(end, len(echo)))
            end += _length_in(echo, end, own.text, is_special=own.is_special)
        rest = self.write(known)
        self._offset = len(echo)
        return CompletionLogprobs(
            tokens=[first, *rest.tokens],
            token_logprobs=[None, *rest.token_logprobs],
            top_logprobs=[None, *rest.top_logprobs],
            text_offset=offsets,
        )

    def _is_skipped(self, own: Logprob) -> bool:
        return own.is_special and self._skips_special_tokens


def _length_in(echo: str, offset: int, text: str, *, is_special: bool) -> int:
    """Characters of a prompt, as its client wrote it, that the token at `offset` stands for.

    A tokenizer adds special tokens at the ends, and spaces where words begin: those are not in it.
    """
    if echo.startswith(text, offset):
        return len(text)
    if is_special:
        return 0
    has_space_added = text.startswith(" ") and echo.startswith(text[1:], offset)
    return len(text) - has_space_added


def join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Put the lists of two pieces behind each other."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _own(position: PositionLogprobs) -> Logprob:
    """The token that stands at a position."""
    return next(iter(position.values()))


def _by_name(position: PositionLogprobs) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, entry in position.items():
        key = name(entry)
        # Two ids may have the same bytes; neither hides the other.
        found[key if key not in found else f"token_id:{token_id}"] = number(entry)
    return found
