"""Agreement: a step that all ranks of a replica take, or none.

Called by: peer_memory.py and symmetric_memory.py, at the start: a rank that can't do what its peers can must not go
another way than they, or they would wait for each other in different collectives for ever.

When a peer dies: the wait for its word ends with the store's timeout; the executor sees the death first.
"""

from types import TracebackType

import torch.distributed as dist

_FINE = b"\0"
"""What no error text begins with."""


class Agreement:
    """A block at whose end each rank tells the others in `store` how it went for it, and hears it of them.

    step:    names it, once for each store
    refusal: what a rank raises in the block that cannot take the step. All others raise it then, too, at the end of
             theirs; it is made of one text. Other errors end the rank, and are not told
    says:    what the others hear when all went well here
    heard:   of all ranks, after the block
    """

    def __init__(self, store: dist.Store, step: str, rank: int, size: int, refusal: type[Exception]) -> None:
        self._store = store
        self._step = step
        self._rank = rank
        self._size = size
        self._refusal = refusal
        self.says = b""
        self.heard: list[bytes] = []

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, self._refusal):
            return
        self._store.set(f"{self._step}-{self._rank}", _FINE + self.says if error is None else str(error))
        answers = [self._store.get(f"{self._step}-{peer}") for peer in range(self._size)]
        problems = [
            f"rank {peer}: {answer.decode()}"
            for peer, answer in enumerate(answers)
            if not answer.startswith(_FINE)
        ]
        if problems:
            raise self._refusal("; ".join(problems))
        self.heard = [answer.removeprefix(_FINE) for answer in answers]
