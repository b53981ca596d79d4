"""What the engine asks of a grammar: which tokens may come next, and whether it is at its end.

Called by: Scheduler (matchers), CompilerPool (compilers). The implementation is in llguidance_backend.py.
Invariant: a matcher's state is a function of the tokens that it accepted, which are the known output tokens of
its request. Only end tokens are allowed where the grammar is complete and nothing may follow, and no end token
where it is not complete.
Thread: one matcher belongs to one thread at a time; a grammar and a compiler may be used from any.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...shm.errors import ServingError
from ...workers.sampling_params import StructuredOutputs

Words = npt.NDArray[np.uint32]
"""A row of a mask: [ceil(vocab_size / 32)], bit j of word i allows token 32 * i + j."""


class GrammarError(ServingError):
    """A grammar that cannot be served. The text is fit for the client: it holds no state of the library."""


class Matcher(Protocol):
    """Where one output stands in its grammar."""

    @property
    def is_finished(self) -> bool:
        """True when the grammar has ended: nothing but end tokens may follow, or one has come."""
        ...

    @property
    def problem(self) -> str | None:
        """Why nothing can follow although the grammar is not complete, in words for the client; None: it can."""
        ...

    def fill(self, words: Words) -> None:
        """Write which tokens may come next. Overwrites all of `words`."""
        ...

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Move on by these tokens; all or nothing. False: one of them is not allowed, and nothing has changed, or
        the grammar cannot go on behind them (`problem`).
        """
        ...

    def probe(self, token_ids: Sequence[int]) -> int:
        """Count how many of these tokens would be accepted, from the first on. Nothing changes."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        ...


class Grammar(Protocol):
    """A compiled grammar, for any number of outputs."""

    def new_matcher(self, end_token_ids: frozenset[int]) -> Matcher:
        """Start at the beginning. end_token_ids: what may end the output, and nothing else does."""
        ...


class GrammarCompiler(Protocol):
    """Compiles specifications for one tokenizer. Any thread."""

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """Compile. Takes milliseconds, the first time a second. Raises GrammarError."""
        ...
