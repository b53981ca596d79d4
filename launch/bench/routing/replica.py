"""A replica in simulated time: the scheduler's rules, and a model of how long a step takes. Pure.

Called by: simulation.py. It follows engine/scheduler.py and engine/kv_cache_manager.py: running requests first, one
token for each that decodes, prompts in chunks, one prompt takes at most its share while others wait, admission while
blocks last, the youngest is preempted when they do not; a block can be hit from the step on that computes it. What it
leaves out: blocks are counted in tokens, and of the steps in which nothing but decoding happens many are done at once.

A step takes base + prefill tokens * p + decode tokens * d + context tokens * c: the `StepCost` of a real engine.
"""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from ....cluster.step_cost import StepCost
from ....engine.messages import AdmittedMark, EngineStats
from ....engine.prefix_log import PrefixDelta, PrefixLog
from .load import SimRequest
from .prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What all replicas are like. capacity_tokens: of the KV cache."""

    cost: StepCost
    capacity_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_share: float


@dataclass(slots=True, eq=False)
class Job:
    """One request on a replica.

    done_tokens: output tokens made; left: prompt tokens still to be computed
    shared:      its blocks that others can hit; num_published: of its first blocks, how many it has tried to share
    """

    request: SimRequest
    client_index: int
    arrived_at: float
    number: int = 0
    num_expected_cached_tokens: int = 0
    left: int = 0
    num_cached_tokens: int = 0
    shared: list[bytes] = field(default_factory=list)
    num_published: int = 0
    private_tokens: int = 0
    done_tokens: int = 0
    ends_at_step: int = 0
    decodes_since: int = 0
    first_token_at: float = -1.0
    finished_at: float = -1.0
    dp_rank: int = -1
    is_running: bool = field(default=False)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, as far as they are known between steps."""
        return self.request.num_prompt_tokens + self.done_tokens


class Replica:
    """See the module. `add`, then `begin` whenever it is idle; `end` when the time that `begin` said has come."""

    def __init__(self, dp_rank: int, service: Service, block_tokens: int) -> None:
        self.dp_rank = dp_rank
        self._service = service
        self._log = PrefixLog(epoch=0)
        self.first_delta = self._log.follow(())
        self._cache = PrefixCache(block_tokens, self._log)
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        # (last step, tie, job) of the jobs that decode; a job that was preempted leaves its entry behind.
        self._decoding: list[tuple[int, int, Job]] = []
        self._order: dict[int, Job] = {}
        self._ties = itertools.count()
        self._num_decoding = 0
        self._context_tokens = 0
        self._private_tokens = 0
        self._num_jobs = 0
        self._marks: dict[int, int] = {}
        self._began_at = 0.0
        self._step_s = 0.0
        self._step_context_tokens = 0.0
        self._num_planned = 0
        self._chunks: list[tuple[Job, int]] = []
        self.is_busy = False
        self.generation = 0
        self.num_steps = self.num_prefill_tokens = self.num_output_tokens = self.num_preemptions = 0
        self.num_context_tokens = 0
        self.hit_tokens = self.queried_tokens = 0
        self.busy_s = 0.0
        self._num_reports = 0
        self.reported_at = float("-inf")
        self.has_changed = True

    @property
    def num_unfinished(self) -> int:
        """Waiting and running jobs."""
        return self._num_jobs

    def add(self, job: Job) -> None:
        """Let a job wait."""
        job.left = job.request.num_prompt_tokens
        job.dp_rank = self.dp_rank
        self._waiting.append(job)
        self._num_jobs += 1
        self._marks[job.client_index] = job.number
        self.has_changed = True

    def begin(self, now: float) -> float | None:
        """Plan a step, or many in which nothing but decoding happens. Returns when it ends; None: nothing to do."""
        budget = self._service.max_num_batched_tokens - self._num_decoding
        limit = self._prefill_limit()
        self._chunks = []
        num_prefill_tokens = 0
        for job in self._prefilling:
            chunk = min(job.left, budget, limit)
            if chunk <= 0:
                break
            self._plan(job, chunk)
            budget -= chunk
            num_prefill_tokens += chunk
        num_prefill_tokens += self._admit(budget, limit)
        if not self._chunks and not self._num_decoding:
            return None
        cost = self._service.cost
        num_steps = 1
        if not self._chunks:
            num_steps = max(1, self._decoding[0][0] - self.num_steps)
            if self._num_decoding:
                num_steps = max(1, min(num_steps, self._free_tokens() // self._num_decoding))
        # Every decoding job grows by a token a step. A prompt's tokens are in the cache once they are computed.
        grown = self._num_decoding * (num_steps - 1) / 2
        context = self._context_tokens + self._computed_before() + grown
        self._step_context_tokens = context
        self._step_s = (
            cost.base_s
            + num_prefill_tokens * cost.prefill_token_s
            + self._num_decoding * cost.decode_token_s
            + context * cost.context_token_s
        )
        self._began_at = now
        self._num_planned = num_steps
        self.is_busy = True
        self.generation += 1
        return now + num_steps * self._step_s

    def interrupt(self, now: float) -> float | None:
        """Something has come while many steps run: let them end with the current one. Returns when; None: no change."""
        if not self.is_busy or self._num_planned == 1:
            return None
        num_steps = min(self._num_planned, int((now - self._began_at) / self._step_s) + 1)
        if num_steps == self._num_planned:
            return None
        self._num_planned = num_steps
        self.generation += 1
        return self._began_at + num_steps * self._step_s

    def end(self, now: float) -> tuple[list[Job], list[Job]]:
        """The planned steps are over. Returns the jobs that got their first token, and those that are finished."""
        num_steps = self._num_planned
        self.is_busy = False
        self.has_changed = True
        self.num_steps += num_steps
        self.busy_s += num_steps * self._step_s
        self.num_context_tokens += round(num_steps * self._step_context_tokens)
        grown = num_steps * self._num_decoding
        self._context_tokens += grown
        self._private_tokens += grown
        self.num_output_tokens += grown
        finished = self._take_finished(now)
        first = self._end_chunks(now)
        self._make_room()
        return first, [*finished, *(job for job in first if job.finished_at >= 0)]

    def take_delta(self) -> PrefixDelta | None:
        """What has changed in the prefix cache."""
        return self._log.take_delta()

    def stats(self, now: float) -> EngineStats:
        """Report as an engine core does."""
        self._num_reports += 1
        self.has_changed = False
        self.reported_at = now
        expected = sum(max(1, job.left - job.num_expected_cached_tokens) for job in self._waiting)
        block_tokens = self._cache.block_tokens
        capacity = self._service.capacity_tokens
        return EngineStats(
            dp_rank=self.dp_rank,
            epoch=0,
            sequence=self._num_reports,
            reported_at=now,
            num_waiting=len(self._waiting),
            num_running=self._num_decoding + len(self._prefilling),
            num_prefill_tokens=expected + sum(job.left for job in self._prefilling),
            kv_usage=max(0.0, 1.0 - self._free_tokens() / capacity),
            num_free_blocks=max(0, self._free_tokens()) // block_tokens,
            num_free_tokens=max(0, self._free_tokens()),
            num_blocks=capacity // block_tokens,
            num_running_tokens=self._context_tokens
            + sum(job.num_tokens - job.left for job in self._prefilling),
            admitted=[
                AdmittedMark(client_index=client, incarnation=0, number=number)
                for client, number in self._marks.items()
            ],
            busy_s=self.busy_s,
            num_steps=self.num_steps,
            num_prefill_tokens_total=self.num_prefill_tokens,
            num_context_tokens_total=self.num_context_tokens,
            num_output_tokens_total=self.num_output_tokens,
        )

    def _computed_before(self) -> int:
        return sum(job.num_tokens - job.left for job, _ in self._chunks)

    def _free_tokens(self) -> int:
        """Tokens that nobody uses, evictable blocks included."""
        used = self._cache.num_used * self._cache.block_tokens + self._private_tokens
        return self._service.capacity_tokens - used

    def _prefill_limit(self) -> int:
        budget = self._service.max_num_batched_tokens
        if self._waiting or len(self._prefilling) > 1:
            return max(1, int(budget * self._service.long_prefill_share))
        return budget

    def _admit(self, budget: int, limit: int) -> int:
        service, block_tokens = self._service, self._cache.block_tokens
        num_tokens = 0
        while budget > 0 and self._waiting:
            if self._num_decoding + len(self._prefilling) >= service.max_num_seqs:
                break
            job = self._waiting[0]
            keys = job.request.keys[: job.request.num_prompt_blocks]
            # One token at least must be computed.
            hits = self._cache.num_hits(keys[: (job.num_tokens - 1) // block_tokens])
            used = self._cache.num_hits_free(keys[:hits]) * block_tokens
            needed = job.num_tokens - hits * block_tokens + used
            is_alone = not (self._num_decoding or self._prefilling)
            if needed + (0 if is_alone else service.capacity_tokens // 100) > self._free_tokens():
                break
            self._waiting.popleft()
            job.is_running = True
            job.num_cached_tokens = hits * block_tokens
            job.left = job.num_tokens - job.num_cached_tokens
            self.queried_tokens += job.num_tokens
            self.hit_tokens += job.num_cached_tokens
            job.shared = list(keys[:hits])
            job.num_published = hits
            job.private_tokens = job.left
            self._cache.use(job.shared)
            self._private_tokens += job.private_tokens
            self._evict()
            chunk = min(job.left, budget, limit)
            self._prefilling.append(job)
            self._plan(job, chunk)
            budget -= chunk
            num_tokens += chunk
        return num_tokens

    def _plan(self, job: Job, chunk: int) -> None:
        """Compute a part of a prompt in the coming step. Its full blocks can be hit from now on."""
        self._chunks.append((job, chunk))
        block_tokens = self._cache.block_tokens
        keys = job.request.keys[: job.request.num_prompt_blocks]
        num_full = (job.num_tokens - job.left + chunk) // block_tokens
        for key in keys[job.num_published : num_full]:
            # What another one computes as well stays with both, and the other's is found.
            if self._cache.add(key):
                job.shared.append(key)
                job.private_tokens -= block_tokens
                self._private_tokens -= block_tokens
        job.num_published = max(job.num_published, num_full)

    def _take_finished(self, now: float) -> list[Job]:
        finished = []
        while self._decoding and self._decoding[0][0] <= self.num_steps:
            _, _, job = heapq.heappop(self._decoding)
            if job.ends_at_step != self.num_steps or not job.is_running:
                continue
            self._num_decoding -= 1
            self._leave(job, job.request.num_output_tokens)
            self._finish(job, now)
            finished.append(job)
        return finished

    def _end_chunks(self, now: float) -> list[Job]:
        first = []
        for job, chunk in self._chunks:
            job.left -= chunk
            self.num_prefill_tokens += chunk
            if job.left > 0:
                continue
            self._prefilling.remove(job)
            self.num_output_tokens += 1
            job.done_tokens += 1
            job.private_tokens += 1
            self._private_tokens += 1
            if job.first_token_at < 0:
                job.first_token_at = now
                first.append(job)
            remaining = job.request.num_output_tokens - job.done_tokens
            if remaining <= 0:
                self._private_tokens -= job.private_tokens
                self._cache.release(job.shared)
                self._finish(job, now)
                if job not in first:
                    first.append(job)
                continue
            job.decodes_since = self.num_steps
            job.ends_at_step = self.num_steps + remaining
            self._num_decoding += 1
            self._context_tokens += job.num_tokens
            heapq.heappush(self._decoding, (job.ends_at_step, next(self._ties), job))
            self._order[id(job)] = job
        return first

    def _leave(self, job: Job, done_tokens: int) -> None:
        """Take a decoding job out of the sums."""
        made = done_tokens - job.done_tokens
        job.done_tokens = done_tokens
        job.private_tokens += made
        self._context_tokens -= job.num_tokens
        self._private_tokens -= job.private_tokens
        self._cache.release(job.shared)
        del self._order[id(job)]

    def _finish(self, job: Job, now: float) -> None:
        job.finished_at = now
        job.is_running = False
        self._num_jobs -= 1
        # Its output can be hit by the next turn.
        self._cache.add_free(job.request.keys[job.request.num_prompt_blocks :])
        self._evict()

    def _make_room(self) -> None:
        """Preempt the youngest while the next step has no room."""
        while self._free_tokens() < self._num_decoding and len(self._order) > 1:
            job = next(reversed(self._order.values()))
            self._num_decoding -= 1
            self._leave(job, job.done_tokens + self.num_steps - job.decodes_since)
            job.is_running = False
            job.ends_at_step = -1
            job.left = job.num_tokens
            self._waiting.appendleft(job)
            self.num_preemptions += 1
        self._evict()

    def _evict(self) -> None:
        over = self._cache.num_free * self._cache.block_tokens - self._free_tokens()
        if over > 0:
            self._cache.evict(-(-over // self._cache.block_tokens))
