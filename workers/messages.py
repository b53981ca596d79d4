"""The contract between an engine core and its workers: what one step computes, and what comes back.

Called by: the scheduler fills `SchedulerOutput`, the model runner reads it and answers `ModelRunnerOutput`;
the executor carries both. They live with the callee, so that the engine depends on the workers and never
the other way round. All are msgspec values: they cross process borders as msgpack and are never changed.

New requests travel whole, running ones as differences: the workers keep each request's tokens and block
table in their own rows, and append the tokens that they sampled themselves. So a step can be sent before the
one ahead of it is back: its tokens are where they are needed. In the steady state a running request costs a
step one entry of a dictionary and one of a list, and no object.
"""

import msgspec

from .sampling_params import SamplingParams


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the workers do not hold: new, or resumed after preemption or the loss of a replica.

    token_ids:           prompt tokens, then the output tokens made so far
    num_prompt_tokens:   how many of them are prompt
    num_computed_tokens: how many have their KV in the cache already (prefix hits)
    block_ids:           all blocks of the request, in order: one of each KV cache group for the first tokens, then one
                         of each for the next ones; 0 where a group with a window needs none any more
    seed:                of the sampling noise; always set
    stop_token_ids:      tokens that min_tokens holds back: the model's own end tokens and the client's
    vocab_limit:         ids from here on are padding of the model's vocabulary, and never sampled; None: all are real
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    vocab_limit: int | None = None


class GrammarMasks(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens the grammars of some requests allow next. Follows its step when the step before it is known.

    step:        of which step
    request_ids: requests of the step that sample in it and have a grammar; all others are free, also those that
                 have ended meanwhile: nobody wants what they sample
    bits:        [len(request_ids), ceil(vocab_size / 32)] little-endian uint32 words; bit j of word i allows
                 token 32 * i + j
    """

    step: int
    request_ids: list[str]
    bits: bytes


class RowState(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must hold of a request before a step, by the scheduler's books. For debugging.

    num_tokens:   known tokens, and those of steps in flight
    num_known:    tokens from the first on that the scheduler knows
    known_digest: CRC-32 of these, as little-endian int32
    block_ids:    see `NewRequest.block_ids`; where it says 0 the worker may hold anything
    """

    num_tokens: int
    num_known: int
    known_digest: int
    block_ids: list[int]


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step computes.

    num_scheduled_tokens: tokens to compute for each request of this step, running ones first; every value is
                          positive. A request that is not in `new_requests` is held by the workers
    num_computed_tokens:  parallel to it: tokens computed before this step, as the scheduler counts; the worker's
                          own count must agree
    new_block_ids:        blocks added in this step, for those held requests that grew; in the order of
                          `NewRequest.block_ids`. A block that left a window stays in the worker's table, unread
    removed_request_ids:  rows to drop before anything else: finished, aborted and preempted requests
    row_states:           of every request of the step, when scheduler.check_worker_rows is on
    needs_masks:          exactly one `GrammarMasks` follows, before any other step; no rank samples until it has them

    A request samples one token in this step exactly when its computed and scheduled tokens together reach
    the tokens known of it; a prompt chunk before the last one samples nothing. A request that is removed and
    new in one step starts afresh.
    """

    step: int
    new_requests: list[NewRequest]
    num_scheduled_tokens: dict[str, int]
    num_computed_tokens: list[int]
    removed_request_ids: list[str]
    new_block_ids: dict[str, list[int]] = {}
    needs_masks: bool = False
    row_states: dict[str, RowState] = {}

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(self.num_scheduled_tokens.values())


class LogprobTable(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at some positions of one request, packed, little-endian.

    width:     numbers at each position: the token that stands there, then the likeliest ones, the best first
    token_ids: [positions, width] int32
    values:    [positions, width] float32; -inf for what could not be
    ranks:     [positions] int32, of the token that stands there: 1 + tokens that are more likely
    """

    width: int
    token_ids: bytes
    values: bytes
    ranks: bytes


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step sampled: parallel lists, only the requests that sampled, in the order of the step.

    logprobs:        of the sampled tokens, for the requests that asked
    prompt_logprobs: of all prompt tokens but the first, with the first sample of those that asked
    """

    step: int
    request_ids: list[str]
    sampled_token_ids: list[int]
    logprobs: dict[str, LogprobTable] = {}
    prompt_logprobs: dict[str, LogprobTable] = {}


class PhaseTime(msgspec.Struct, frozen=True, array_like=True):
    """One phase of a start: its name and how long it took."""

    name: str
    duration_s: float


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker says of itself when it is ready.

    device:        "cpu", "cuda:0"; device_name: as the driver calls it
    collectives:   what the ranks exchange through: "shm", "gloo", "nccl", or "none" for a single one
    weight_bytes:  of this rank's shard, as it is stored
    num_kv_blocks: blocks that fit this rank's memory; the replica uses the minimum over its ranks
    kv_windows:    of each KV cache group, the tokens that a query sees at most; None: all. The same on all ranks
    num_threads:   compute threads of this rank (CPU)
    free_bytes:    of its GPU, before the rank took any; None on CPU
    """

    tp_rank: int
    pid: int
    device: str
    device_name: str
    dtype: str
    attention_backend: str
    weight_bytes: int
    kv_bytes_per_block: int
    num_kv_blocks: int
    num_threads: int
    phases: list[PhaseTime]
    collectives: str = "none"
    kv_windows: tuple[int | None, ...] = (None,)
    free_bytes: int | None = None


class ExecutorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor knows when all its ranks are ready.

    num_kv_blocks: of the replica, the null block included; block 0 is the null block, never given out
    max_model_len: longest request in tokens
    """

    num_kv_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    ranks: list[RankReport]

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Of each KV cache group, the tokens that a query sees at most; None: all."""
        return self.ranks[0].kv_windows
