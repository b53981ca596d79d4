"""PromptLogprobs: log-probabilities of prompt tokens, gathered while the prompt is computed chunk by chunk.

Called by: the model runner, in each step that computes prompt tokens of a request that asked for them. What has been
gathered is kept with the request's row until its prompt is complete, so a request that is preempted meanwhile starts
again from nothing, and nothing is told twice.

    prompt          t0   t1   t2 | t3   t4       logits at t_i say how likely t_(i+1) was;
    chunk 1          .----^---^---^              t0 has none, and those at the last token sample the output
    chunk 2                        `----^
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .config import LogprobsMode
from .kernels.ops import HAS_TRITON, is_fused
from .logit_processors import LARGEST, mask_padding
from .logprobs import HostCopy, LogprobTensors, gather_logprobs, pack_table
from .messages import LogprobTable
from .upload import upload_one

if HAS_TRITON:
    from . import fused_sampling
    from .kernels.triton_rows import LogitRows

ROWS_AT_ONCE = 64
"""Positions whose logits exist at the same time: a long chunk's would take more memory than all else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """The part of one request's prompt that a step has computed.

    row:         of the request
    start, stop: which of the step's tokens have a prompt token after them
    next_ids:    [stop - start] int64, those prompt tokens
    num_top:     likeliest tokens that are wanted at each; -1: all
    vocab_limit: first id that is padding
    """

    row: int
    start: int
    stop: int
    next_ids: npt.NDArray[np.int64]
    num_top: int
    vocab_limit: int


class PromptLogprobs:
    """Of all requests whose prompt is not complete. Owner: the model runner.

    compute_logits: hidden states [n, hidden_size] -> logits [n, vocab_size]
    """

    def __init__(
        self, compute_logits: Callable[[torch.Tensor], torch.Tensor], *, vocab_size: int, mode: LogprobsMode
    ) -> None:
        self._compute_logits = compute_logits
        self._vocab_size = vocab_size
        # Nothing is done to the logits of a prompt: raw and processed are the same.
        self._is_normalised = mode in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS)
        self._copies: dict[int, list[HostCopy]] = {}

    def add(self, chunk: PromptChunk, hidden: torch.Tensor) -> None:
        """Gather what a step has computed. hidden: [num_tokens, hidden_size] of the step, on every rank the same."""
        copies = self._copies.setdefault(chunk.row, [])
        num_top = self._vocab_size if chunk.num_top < 0 else min(chunk.num_top, self._vocab_size)
        for start in range(chunk.start, chunk.stop, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, chunk.stop)
            logits = self._compute_logits(hidden[start:stop].contiguous())
            ids = upload_one(chunk.next_ids[start - chunk.start : stop - chunk.start], logits.device)
            table = self._gather(logits, ids, num_top, chunk.vocab_limit)
            copies.append(HostCopy([table.token_ids, table.values, table.ranks]))

    def _gather(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, vocab_limit: int
    ) -> LogprobTensors:
        limits = torch.full((logits.shape[0],), vocab_limit, device=logits.device)
        if is_fused(logits):
            rows = LogitRows(logits=logits, limits=limits)
            index = torch.arange(logits.shape[0], device=logits.device)
            return fused_sampling.gather(rows, index, token_ids, num_top, is_normalised=self._is_normalised)
        logits = logits.float().clamp(max=LARGEST)
        mask_padding(logits, limits, vocab_limit, 0)
        return gather_logprobs(logits, token_ids, num_top, is_normalised=self._is_normalised)

    def take(self, row: int) -> LogprobTable | None:
        """Return all of a request whose prompt is complete, once. None: it has not asked."""
        copies = self._copies.pop(row, None)
        if copies is None:
            return None
        parts = [[tensor.numpy() for tensor in copy.wait()] for copy in copies]
        if not parts:
            return LogprobTable(width=1, token_ids=b"", values=b"", ranks=b"")
        token_ids, values, ranks = (np.concatenate(column) for column in zip(*parts, strict=True))
        return pack_table(token_ids, values, ranks)

    def drop(self, row: int) -> None:
        """Forget a request that was removed."""
        self._copies.pop(row, None)
