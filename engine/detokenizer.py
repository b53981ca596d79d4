"""Tokens to text, one at a time: no prompt text, no half characters, and an end at the first stop string.

Called by: OutputProcessor, once per output token of each request that wants text. Front end, one thread.

    window of token ids         [context | emitted ....... | new]
    its text                     "...known characters......" + "what this token adds"

The window is decoded again with each token, because a token's text depends on its neighbours (spaces, bytes
of one character); it is cut to a few tokens of context whenever it ends at a character's border. Concatenated
pieces are the final text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 5
"""Prompt tokens, later output tokens, that are decoded along so that spacing comes out right."""
MAX_CONTEXT_TOKENS = NUM_CONTEXT_TOKENS + 3
"""A context must not begin inside a character, which has at most four bytes."""
SOFT_WINDOW_TOKENS = 12
"""Tokens in the window before it is cut: a balance between the length of each decode and cutting often."""
HARD_WINDOW_TOKENS = 64
"""An output of nothing but broken bytes never comes to a character's border; its window is cut regardless."""
MAX_HELD_MARKS = 3
"""A character has at most four bytes, so at most three replacement marks can still become one."""
MAX_HELD_STEPS = 4
"""Tokens after which held marks that did not change are what the model meant (the character U+FFFD itself)."""


class IncrementalDecoder:
    """Text of one output, token by token."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = self._choose_context(self._last_visible(prompt_token_ids))
        # A prompt may end inside a character: what completes it is output, what stands before it is not.
        self._emitted = self._complete_part(self._window)
        self._num_settled = len(self._window)
        self._held = ""
        self._num_held_steps = 0

    def add(self, token_id: int) -> str:
        """Take one more token. Returns the text that is certain now; may be empty."""
        if not self._visible([token_id]):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.startswith(self._emitted):
            new = text[len(self._emitted) :]
            num_held = min(_count_marks(new), MAX_HELD_MARKS)
        else:
            # Decoders with byte fallback judge a run of bytes as a whole: until the last character of the run
            # is complete, those before it read as marks too.
            new = self._decode(self._window[self._num_settled :])
            num_held = len(new) if 0 < _count_marks(new) <= MAX_HELD_MARKS else 0
            if not num_held:
                self._window, self._emitted, self._num_settled = self._window[self._num_settled :], "", 0
        held = new[len(new) - num_held :]
        is_stuck = held != "" and held == self._held and len(held) == len(new)
        self._num_held_steps = self._num_held_steps + 1 if is_stuck else 0
        if self._num_held_steps >= MAX_HELD_STEPS or len(self._window) > HARD_WINDOW_TOKENS:
            held = ""
        piece = new[: len(new) - len(held)]
        self._held = held
        self._emitted += piece
        if not held:
            self._settle()
        return piece

    def flush(self) -> str:
        """Return what was held back. Call once, at the end."""
        held, self._held = self._held, ""
        return held

    def _settle(self) -> None:
        """All text of the window is out. Cut the window when it has become long."""
        if len(self._window) > SOFT_WINDOW_TOKENS:
            self._window = self._choose_context(self._window)
            self._emitted = self._decode(self._window)
        self._num_settled = len(self._window)

    def _choose_context(self, token_ids: list[int]) -> list[int]:
        """Take the last tokens as context, a few more when they would begin inside a character."""
        for count in range(NUM_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS):
            context = token_ids[-count:]
            if not self._decode(context).startswith(REPLACEMENT):
                return context
        return token_ids[-MAX_CONTEXT_TOKENS:]

    def _complete_part(self, token_ids: list[int]) -> str:
        """Decode the prompt's last tokens up to the last complete character."""
        text = self._decode(token_ids)
        if not text.endswith(REPLACEMENT):
            return text
        # Either one token holds whole characters and a part of the next one, or a run of byte tokens reads as
        # marks as a whole; the longer answer knows more.
        candidates = [text.rstrip(REPLACEMENT)]
        for count in range(1, min(MAX_HELD_MARKS, len(token_ids)) + 1):
            shorter = self._decode(token_ids[:-count])
            if not shorter.endswith(REPLACEMENT):
                candidates.append(shorter)
                break
        return max(candidates, key=len)

    def _last_visible(self, token_ids: Sequence[int]) -> list[int]:
        """Take as many of the last tokens as a context may need; those that add no text are passed over.

        An empty context is the beginning of a text, where some decoders drop a space.
        """
        found: list[int] = []
        for token_id in reversed(token_ids):
            found += self._visible([token_id])
            if len(found) == 2 * MAX_CONTEXT_TOKENS:
                break
        return found[::-1]

    def _visible(self, token_ids: Sequence[int]) -> list[int]:
        # Skipped tokens add no text; as context they would crowd out tokens that do.
        if not self._skip_special_tokens:
            return list(token_ids)
        return [token_id for token_id in token_ids if token_id not in self._tokenizer.special_ids]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _count_marks(text: str) -> int:
    return len(text) - len(text.rstrip(REPLACEMENT))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """A stop string that ended an output: which one, and how many characters of the text remain."""

    stop: str
    text_length: int


class StopChecker:
    """Finds the stop string that completes first, as if the text came character by character.

    stops:      in the client's order, which decides between strings that complete together
    min_tokens: a match may begin in, but not end in, the text of the first min_tokens tokens
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool, min_tokens: int) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.num_held_characters = max((len(stop) for stop in stops), default=1) - 1

    def find(self, text: str, num_new_characters: int, num_tokens: int) -> StopMatch | None:
        """Look for a match that ends in the last `num_new_characters` of `text`.

        num_tokens: output tokens so far, the one that added the new text included
        """
        if not num_new_characters or num_tokens <= self._min_tokens:
            return None
        first_end = len(text) - num_new_characters
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, first_end - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = start + len(stop), stop
        if best is None:
            return None
        end, stop = best
        return StopMatch(stop=stop, text_length=end if self._include_stop else end - len(stop))


class Detokenizer:
    """The text of one output: decoder, stop strings, and what may be shown already."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = IncrementalDecoder(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._stops = StopChecker(stops, include_stop=include_stop, min_tokens=min_tokens)
        self._include_stop = include_stop
        self._text = ""
        self._num_tokens = 0
        self.is_finished = False

    @property
    def text(self) -> str:
        """What may be shown: all but the characters that could still become part of a stop string."""
        if self.is_finished or not self._stops.num_held_characters:
            return self._text
        return self._text[: -self._stops.num_held_characters]

    def add(self, token_id: int) -> str | None:
        """Take one more output token. Returns the stop string that it completed, else None."""
        self._num_tokens += 1
        return self._append(self._decoder.add(token_id))

    def finish(self, last_token_id: int | None = None) -> str | None:
        """End the output; `text` holds nothing back from now on.

        last_token_id: the end or stop token that ended it; it counts as a token and is shown only where stop
        strings are shown. Returns the stop string that the held text completed, else None.
        """
        piece = ""
        if last_token_id is not None:
            self._num_tokens += 1
            if self._include_stop:
                piece = self._decoder.add(last_token_id)
        stop = self._append(piece + self._decoder.flush())
        self.is_finished = True
        return stop

    def _append(self, piece: str) -> str | None:
        self._text += piece
        match = self._stops.find(self._text, len(piece), self._num_tokens)
        if match is None:
            return None
        self._text = self._text[: match.text_length]
        self.is_finished = True
        return match.stop
