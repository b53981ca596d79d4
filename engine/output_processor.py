"""From `StepOutputs` to `RequestOutput`: text, stop strings, streams and latencies.

Called by: `LLM` (one thread) and `AsyncLLM` (its event loop). Owner of every request's state in the front end.
Invariants: outputs of an older attempt, and of requests that are gone, are dropped; after a finished output a
request is forgotten. A stream that nobody reads holds one output, into which later ones are merged.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .detokenizer import Detokenizer
from .errors import (
    InvalidRequestError,
    PoisonousRequestError,
    QueueFullError,
    ReplicaLostError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
)
from .input_processor import ProcessedRequest
from .logprobs import LogprobReader, PositionLogprobs, read_prompt
from .messages import EngineCoreOutput, EngineCoreRequest, FinishReason, StepOutputs
from .outputs import CompletionOutput, OutputKind, RequestOutput, RequestTimes, merge_deltas
from .parallel_sampling import SampleGroup, fan_out
from .token_text import TokenTexts
from .tokenizer import Tokenizer

_FAILURES = frozenset({FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT})


class RequestStream:
    """What one reader of one request waits on. Event loop only.

    Holds one output at most: deltas are merged, a cumulative output replaces the one before. So a reader that
    is slow costs the memory of its output, and no more.
    """

    def __init__(self, kind: OutputKind) -> None:
        self._kind = kind
        self._output: RequestOutput | None = None
        self._error: RequestError | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Hand over the next output; never blocks."""
        if self._output is not None and self._kind is OutputKind.DELTA:
            output = merge_deltas(self._output, output)
        self._output = output
        self._has_news.set()

    def fail(self, error: RequestError) -> None:
        """End the stream with an error, after what was put before."""
        self._error = error
        self._has_news.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output. Raises the error that ended the stream."""
        await self._has_news.wait()
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._has_news.clear()
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedOutputs:
    """What the outputs of a step came to.

    outputs:           of requests without a stream
    errors:            of requests without a stream, by request_id
    abort_request_ids: requests that ended here, by a stop string, and go on in the engine
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    errors: dict[str, RequestError] = field(default_factory=dict)
    abort_request_ids: list[str] = field(default_factory=list)


class OutputProcessor:
    """All unfinished requests of one front end.

    clock: of `RequestTimes`
    """

    def __init__(self, tokenizer: Tokenizer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._clock = clock
        self._states: dict[str, _RequestState] = {}
        self._groups: dict[str, SampleGroup] = {}

    @property
    def num_unfinished_requests(self) -> int:
        """Requests whose last output has not come."""
        return len(self._states)

    def add_request(
        self,
        processed: ProcessedRequest,
        *,
        stream: RequestStream | None = None,
        kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> list[EngineCoreRequest]:
        """Expect outputs for a request. Without a stream only its final output is made.

        Returns what the engine must be asked for: one request, or one for each sample. The id must be new.
        """
        request_id = processed.core_request.request_id
        children = fan_out(processed)
        assert not self._states.keys() & {request_id, *(child.request_id for child in children)}
        assert request_id not in self._groups
        group = None
        if len(children) > 1:
            child_ids = [child.request_id for child in children]
            group = SampleGroup(request_id, child_ids, processed.core_request.sampling_params, kind)
            kind = group.child_kind
            self._groups[request_id] = group
        for index, child in enumerate(children):
            self._states[child.request_id] = _RequestState(
                self._tokenizer, self._texts, child, processed.prompt, stream, kind, group, index
            )
        return children

    def remove_requests(self, request_ids: Iterable[str], error: RequestError | None = None) -> list[str]:
        """Forget requests that nobody wants any more. Unknown ids are ignored.

        error: what their streams end with; None: nobody reads them
        Returns the ids by which the engine knows them, those that it has finished left out.
        """
        removed = []
        for request_id in request_ids:
            group = self._groups.pop(request_id, None)
            for child_id in [request_id] if group is None else group.child_ids:
                state = self._states.pop(child_id, None)
                if state is None:
                    continue
                removed.append(child_id)
                if error is not None and state.stream is not None:
                    state.stream.fail(error)
        return removed

    def fail_all(self, error: RequestError) -> None:
        """End all streams with an error, and forget all requests."""
        for state in self._states.values():
            if state.stream is not None:
                state.stream.fail(error)
        self._states.clear()
        self._groups.clear()

    def process(self, core_outputs: StepOutputs) -> ProcessedOutputs:
        """Take what the engine made; streams get theirs at once."""
        result = ProcessedOutputs()
        now = self._clock()
        for request_id, token_id in zip(core_outputs.request_ids, core_outputs.token_ids, strict=True):
            state = self._states.get(request_id)
            if state is not None and state.request.attempt == 0:
                self._give(state, state.add_token(token_id, now), result, ends_here=True)
        for core_output in core_outputs.others:
            request_id = core_output.request_id
            state = self._states.get(request_id)
            if state is None or core_output.attempt != state.request.attempt:
                continue
            if core_output.finish_reason in _FAILURES:
                error = _to_error(core_output)
                parent_id = request_id if state.group is None else state.group.request_id
                # Of n samples none is of use when one is missing.
                others = self.remove_requests([parent_id])
                result.abort_request_ids.extend(other for other in others if other != request_id)
                if state.stream is None:
                    result.errors[parent_id] = error
                else:
                    state.stream.fail(error)
                continue
            output = state.update(core_output, now)
            self._give(state, output, result, ends_here=core_output.finish_reason is None)
        return result

    def _give(
        self,
        state: "_RequestState",
        output: RequestOutput | None,
        result: ProcessedOutputs,
        *,
        ends_here: bool,
    ) -> None:
        """Hand an output to its reader. ends_here: when it is the last one, the engine does not know."""
        if state.finish_reason is not None:
            del self._states[state.request.request_id]
            if ends_here:
                result.abort_request_ids.append(state.request.request_id)
        if output is None:
            return
        if state.group is not None:
            output = state.group.combine(state.index, output)
            if output.finished:
                del self._groups[state.group.request_id]
        if state.stream is not None:
            state.stream.put(output)
        elif output.finished:
            result.outputs.append(output)


class _RequestState:
    """One request: tokens, text and times so far. Owner: OutputProcessor."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        request: EngineCoreRequest,
        prompt: str | None,
        stream: RequestStream | None,
        kind: OutputKind,
        group: SampleGroup | None,
        index: int,
    ) -> None:
        self.request = request
        self.stream = stream
        self.group = group
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._prompt = prompt
        self._kind = kind
        self._stop_reason: int | str | None = None
        self._token_ids: list[int] = []
        self._num_shown_characters = 0
        self._num_shown_tokens = 0
        self._num_cached_tokens = 0
        self._first_token_at: float | None = None
        params = self.request.sampling_params
        self._stop_token_ids = params.stop_token_ids
        self._texts = texts
        self._logprobs: list[PositionLogprobs] = []
        self._cumulative_logprob = 0.0
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._logprob_reader: LogprobReader | None = None
        if params.logprobs is not None:
            self._logprob_reader = LogprobReader(
                texts, request.prompt_token_ids, skips_special_tokens=params.skip_special_tokens
            )
        self._detokenizer: Detokenizer | None = None
        if params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                self.request.prompt_token_ids,
                stops=params.stop,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
            )

    def add_token(self, token_id: int, now: float) -> RequestOutput | None:
        """Take one token that is not the last one for the engine. As `update`, when there is no more to take."""
        if self._first_token_at is None:
            self._first_token_at = now
        self._token_ids.append(token_id)
        if self._detokenizer is not None and (stop := self._detokenizer.add(token_id)) is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, stop
        if self.finish_reason is None and self.stream is None:
            return None
        return self._make_output(now)

    def update(self, core_output: EngineCoreOutput, now: float) -> RequestOutput | None:
        """Take new tokens. Returns what the reader gets: always something for streams, else only at the end."""
        self._num_cached_tokens = max(self._num_cached_tokens, core_output.num_cached_tokens)
        if core_output.new_token_ids and self._first_token_at is None:
            self._first_token_at = now
        self._append(core_output)
        self._append_logprobs(core_output)
        if self.finish_reason is None and self.stream is None:
            return None
        return self._make_output(now)

    def _append(self, core_output: EngineCoreOutput) -> None:
        """Go token by token, so that the first end that comes is the one that counts."""
        last = len(core_output.new_token_ids) - 1
        for index, token_id in enumerate(core_output.new_token_ids):
            self._token_ids.append(token_id)
            is_end_token = (
                index == last
                and core_output.finish_reason is FinishReason.STOP
                # A grammar may also end with text, where the model has no end token.
                and (token_id in self.request.eos_token_ids or token_id in self._stop_token_ids)
            )
            stop = None
            if self._detokenizer is not None:
                stop = self._detokenizer.finish(token_id) if is_end_token else self._detokenizer.add(token_id)
            if stop is not None:
                self.finish_reason, self._stop_reason = FinishReason.STOP, stop
                return
        if core_output.finish_reason is None:
            return
        self.finish_reason, self._stop_reason = core_output.finish_reason, core_output.stop_reason
        if self._detokenizer is not None and not self._detokenizer.is_finished:
            stop = self._detokenizer.finish()
            if stop is not None:
                self.finish_reason, self._stop_reason = FinishReason.STOP, stop

    def _append_logprobs(self, core_output: EngineCoreOutput) -> None:
        if core_output.prompt_logprobs is not None:
            prompt = self.request.prompt_token_ids
            self._prompt_logprobs = read_prompt(
                self._texts,
                prompt,
                core_output.prompt_logprobs,
                skips_special_tokens=self.request.sampling_params.skip_special_tokens,
            )
        if self._logprob_reader is None or core_output.logprobs is None:
            return
        # Tokens after the end of the output have none.
        count = len(self._token_ids) - len(self._logprobs)
        positions = self._logprob_reader.read(core_output.logprobs)[:count]
        for position, token_id in zip(positions, self._token_ids[len(self._logprobs) :], strict=True):
            self._cumulative_logprob += position[token_id].logprob
        self._logprobs += positions

    def _make_output(self, now: float) -> RequestOutput:
        text = self._detokenizer.text if self._detokenizer is not None else ""
        has_logprobs = self._logprob_reader is not None
        first = 0
        if self._kind is OutputKind.DELTA:
            first = self._num_shown_tokens
            new_text, new_token_ids = text[self._num_shown_characters :], self._token_ids[first:]
            self._num_shown_characters, self._num_shown_tokens = len(text), len(self._token_ids)
        else:
            new_text, new_token_ids = text, list(self._token_ids)
        completion = CompletionOutput(
            text=new_text,
            token_ids=new_token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            logprobs=self._logprobs[first:] if has_logprobs else None,
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
        )
        is_finished = self.finish_reason is not None
        return RequestOutput(
            request_id=self.request.known_as,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[completion],
            finished=is_finished,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=len(self._token_ids),
            times=RequestTimes(
                arrived_at=self.request.arrived_at,
                first_token_at=self._first_token_at,
                finished_at=now if is_finished else None,
            ),
            prompt_logprobs=self._prompt_logprobs,
        )


def _to_error(core_output: EngineCoreOutput) -> RequestError:
    message = core_output.error or "the request was ended"
    if core_output.finish_reason is FinishReason.ABORT:
        return RequestAbortedError("the request was aborted: the engine stops")
    if core_output.finish_reason is FinishReason.TIMEOUT:
        return RequestTimeoutError("the request was not finished in the time that it was given")
    if core_output.retry_after_s is not None:
        return QueueFullError(core_output.retry_after_s)
    if core_output.is_poisonous:
        return PoisonousRequestError()
    if core_output.is_invalid:
        return InvalidRequestError(message, field=core_output.error_field)
    return ReplicaLostError(message)
