"""AsyncLLM: generate on an event loop; the API server's engine, and a user's own.

    async with await AsyncLLM.launch("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
        async for output in llm.generate("Hello", SamplingParams(max_tokens=20)):
            print(output.outputs[0].text, end="")

Called by: users and launch/server. Everything runs on one event loop; one task takes all outputs and hands them to
the streams. Leaving an iterator early, or cancelling its task, aborts the request. When the engine is lost every
stream ends with ReplicaLostError, and so does every later call.

A caller's id for a request may be used again as soon as that one has ended, also by an abort of which the engine knows
nothing yet. So each request has an id of its own for everything below, which is never used a second time: what still
comes of an older one of the same name finds nobody.
"""

import asyncio
import functools
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence, Sized
from types import TracebackType
from typing import Any, Self

from ..workers.config import DeviceType, DType
from ..workers.sampling_params import SamplingParams
from .core_client import CoreClient, ProcessCoreClient
from .engine_options import make_engine_config
from .errors import InvalidRequestError, ReplicaLostError, RequestAbortedError, RequestError
from .input_processor import (
    DEFAULT_OPTIONS,
    InputProcessor,
    Message,
    ProcessedRequest,
    Prompt,
    RequestOptions,
    check_text,
)
from .output_processor import OutputProcessor, RequestStream
from .outputs import OutputKind, RequestOutput

log = logging.getLogger(__name__)

LONG_PROMPT = 20_000
"""Characters or tokens. From here on tokenising and hashing take milliseconds, and are done in a thread: other streams
go on meanwhile."""
LONG_FORM = 4096
"""Characters of a specification of `structured_outputs`: likewise, for checking it."""
MANY_WORDS = 32
"""Bad words: likewise."""
SAMPLES_AT_ONCE = 16
"""Of one prompt: after so many others have their turn."""
_ABORTED = "the request was aborted"


class AsyncLLM:
    """Generates over a `CoreClient`, which may stand for one replica or many.

    client_index: of this front end, as its engine cores know it
    """

    def __init__(
        self, core_client: CoreClient, input_processor: InputProcessor, *, client_index: int = 0
    ) -> None:
        self._client = core_client
        self._inputs = input_processor
        self._client_index = client_index
        self._outputs = OutputProcessor(input_processor.tokenizer)
        # Front ends of one cluster share their engine cores, and each may be restarted: none counts as another does.
        self._prefix = secrets.token_hex(4)
        self._ids = itertools.count()
        # The engine's id of each unfinished request, by its caller's.
        self._running: dict[str, str] = {}
        self._start_lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._error: RequestError | None = None

    @classmethod
    async def launch(
        cls,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        dtype: DType | str = DType.AUTO,
        device: DeviceType | str = DeviceType.AUTO,
        **overrides: Any,
    ) -> "AsyncLLM":
        """Start one replica of a model in processes of its own, and connect to it.

        Takes seconds to minutes, off the event loop. Arguments and errors as of `LLM`.
        """
        config = await asyncio.to_thread(
            make_engine_config,
            model,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            device=device,
            **overrides,
        )
        client = await asyncio.to_thread(ProcessCoreClient.launch, config)
        try:
            inputs = await asyncio.to_thread(
                InputProcessor.from_model, config.model, max_model_len=client.report.max_model_len
            )
            llm = cls(client, inputs)
            await llm.start()
        except BaseException:
            await client.close()
            raise
        return llm

    @property
    def input_processor(self) -> InputProcessor:
        """Tokenizer, chat template, vocabulary and context length."""
        return self._inputs

    @property
    def num_unfinished_requests(self) -> int:
        """Requests whose last output has not come."""
        return self._outputs.num_unfinished_requests

    @property
    def error(self) -> RequestError | None:
        """Why nothing more can be generated; None while all is well."""
        return self._error

    async def wait_failed(self) -> RequestError:
        """Wait until nothing more can be generated, whatever the cause; return it."""
        assert self._task is not None, "start() first"
        await asyncio.wait({self._task})
        assert self._error is not None
        return self._error

    async def start(self) -> None:
        """Connect and begin to take outputs. Idempotent, also for callers at the same time."""
        async with self._start_lock:
            if self._task is None:
                await self._client.start()
                self._task = asyncio.create_task(self._dispatch(), name="dispatch engine outputs")

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = OutputKind.DELTA,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until the request is finished.

        request_id:  unique among the unfinished ones; None: made up here
        output_kind: DELTA: each output holds what is new since the last; a slow reader gets fewer, larger ones
        options:     priority, salt of the prefix cache, deadline
        Raises InvalidRequestError or QueueFullError before the first output, RequestTimeoutError,
        ReplicaLostError or RequestAbortedError at any time.
        """
        if self._error is not None:
            raise self._error
        assert self._task is not None, "start() first"
        if request_id is not None:
            check_text("request_id", request_id)
        engine_id = f"{self._prefix}-{next(self._ids)}"
        request_id = f"request-{engine_id}" if request_id is None else request_id
        if request_id in self._running:
            raise InvalidRequestError(f"a request with the id {request_id!r} is running", field="request_id")
        self._running[request_id] = engine_id
        is_finished = False
        try:
            processed = await self._process(
                engine_id, request_id, prompt, sampling_params or SamplingParams(), options
            )
            # Much may have happened while a thread was at it.
            self._check_wanted(request_id, engine_id)
            stream = RequestStream(output_kind)
            core_requests = self._outputs.add_request(processed, stream=stream, kind=output_kind)
            for number, core_request in enumerate(core_requests):
                if number % SAMPLES_AT_ONCE == SAMPLES_AT_ONCE - 1:
                    await asyncio.sleep(0)
                    self._check_wanted(request_id, engine_id)
                await self._client.add_request(core_request)
            while not is_finished:
                try:
                    output = await stream.get()
                except RequestError:
                    is_finished = True
                    raise
                is_finished = output.finished
                if is_finished:
                    self._release(request_id, engine_id)
                yield output
        finally:
            self._release(request_id, engine_id)
            if not is_finished:
                await self._drop(engine_id)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = OutputKind.DELTA,
        options: RequestOptions = DEFAULT_OPTIONS,
        **template_variables: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the next message of a chat, by the model's own template. See `generate`."""
        prompt = self._inputs.render_chat(messages, **template_variables)
        outputs = self.generate(prompt, sampling_params, request_id, output_kind=output_kind, options=options)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator raises RequestAbortedError. Unknown ids are ignored."""
        engine_id = self._running.pop(request_id, None)
        if engine_id is not None:
            await self._drop(engine_id, RequestAbortedError(_ABORTED))

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes.

        Returns False where requests hold blocks: nothing was forgotten there. Raises ReplicaLostError.
        """
        if self._error is not None:
            raise self._error
        assert self._task is not None, "start() first"
        return await self._client.reset_prefix_cache()

    async def close(self) -> None:
        """End all streams with RequestAbortedError, and the engine if it was started here. Idempotent."""
        if self._error is None:
            self._fail(RequestAbortedError("the engine is closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        await self._client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_wanted(self, request_id: str, engine_id: str) -> None:
        """Raise what has ended a request of which not all was sent: the loss of the engine, or an abort."""
        if self._error is not None:
            raise self._error
        if self._running.get(request_id) != engine_id:
            raise RequestAbortedError(_ABORTED)

    def _release(self, request_id: str, engine_id: str) -> None:
        """Let the caller's id be used again, unless it already is. Idempotent."""
        if self._running.get(request_id) == engine_id:
            del self._running[request_id]

    async def _drop(self, engine_id: str, error: RequestError | None = None) -> None:
        """Forget a request, here and in the engine. error: what its iterator raises, when anyone reads it still."""
        engine_ids = self._outputs.remove_requests([engine_id], error)
        if not engine_ids:
            return
        try:
            await self._client.abort_requests(engine_ids)
        except RequestError as failure:
            log.debug("abort not delivered request_id=%s error=%s", engine_id, failure)

    async def _process(
        self,
        engine_id: str,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
    ) -> ProcessedRequest:
        process = functools.partial(
            self._inputs.process,
            engine_id,
            prompt,
            params,
            options=options,
            client_index=self._client_index,
            caller_id=request_id,
        )
        form = params.structured_outputs
        # What has no length is no prompt, and refused at once.
        is_long = isinstance(prompt, Sized) and len(prompt) > LONG_PROMPT
        is_long = is_long or (form is not None and form.num_characters > LONG_FORM)
        # Each bad word is tokenised twice.
        is_long = is_long or len(params.bad_words) > MANY_WORDS
        return await asyncio.to_thread(process) if is_long else process()

    async def _dispatch(self) -> None:
        """Take outputs until the engine is lost or this is cancelled. The body of the one task."""
        try:
            while True:
                result = self._outputs.process(await self._client.get_outputs())
                if result.abort_request_ids:
                    await self._client.abort_requests(result.abort_request_ids)
        except RequestError as error:
            self._fail(error)
        except Exception as error:
            # The top of a task: without it a bug here would leave every stream waiting for ever.
            log.exception("output task failed")
            self._fail(ReplicaLostError(f"the front end failed: {error}"))

    def _fail(self, error: RequestError) -> None:
        self._error = error
        self._outputs.fail_all(error)
