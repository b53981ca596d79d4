"""LLM: generate from a script or a notebook, without a server.

    with LLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

Called by: users. The scheduler runs in the caller's thread; with one rank so does the model, with more each rank
is a process. No `if __name__ == "__main__"` is needed: children never run the caller's file.
One thread at a time. Ctrl-C ends `generate` after the step under way, and this LLM can go on. When a worker
dies, `generate` raises ReplicaLostError, and this LLM is of no more use.
"""

import dataclasses
import itertools
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..workers.config import DeviceType, DType
from ..workers.executor import Executor, create_executor
from ..workers.hooks import HookOutcome
from ..workers.messages import ExecutorReport
from ..workers.sampling_params import SamplingParams
from .config import EngineConfig, SchedulerConfig
from .core import EngineCore
from .engine_options import make_engine_config
from .inproc_client import InprocCoreClient
from .input_processor import InputProcessor, Message, Prompt
from .messages import EngineCoreRequest
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .pacing import PACED_STEP_TOKENS, PACED_WEIGHT_BYTES, longest_first
from .tokenizer import Tokenizer, no_tokenizer

T = TypeVar("T")


class LLM:
    """One replica of a model, for batches.

    model:     a folder, or a name on the Hugging Face hub
    skip_tokenizer_init: load no tokenizer: prompts are token ids, and outputs have no text
    overrides: any setting of the engine by its name (max_model_len=2048, num_blocks=100)
    Loading takes place here: it may take minutes. Raises ConfigError or StartupError.
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        dtype: DType | str = DType.AUTO,
        device: DeviceType | str = DeviceType.AUTO,
        skip_tokenizer_init: bool = False,
        **overrides: Any,
    ) -> None:
        config = make_engine_config(
            model, tensor_parallel_size=tensor_parallel_size, dtype=dtype, device=device, **overrides
        )
        executor = _create_executor(config)
        report = executor.start()
        config = dataclasses.replace(config, scheduler=_suit_scheduler(config, report))
        self._is_paced = config.scheduler.paced_step_tokens is not None
        try:
            core = EngineCore(config, executor, report)
            self._inputs = InputProcessor.from_model(
                config.model,
                max_model_len=core.report.max_model_len,
                tokenizer=no_tokenizer() if skip_tokenizer_init else None,
            )
        except BaseException:
            executor.close(reason="start failed")
            raise
        self.report = core.report
        """What the ranks said when they were ready."""
        self._client = InprocCoreClient(core)
        self._outputs = OutputProcessor(self._inputs.tokenizer)
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._inputs.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; outputs are in the order of the prompts.

        sampling_params: one for all, or one for each
        show_progress:   None: when standard error is a terminal and there is more than one prompt
        Raises InvalidRequestError when any prompt or parameter is wrong; nothing was computed then.
        """
        listed: list[Prompt] = _as_list(prompts)
        params = _match_params(sampling_params, len(listed))
        processed = [
            self._inputs.process(str(next(self._ids)), prompt, one)
            for prompt, one in zip(listed, params, strict=True)
        ]
        request_ids = [request.core_request.request_id for request in processed]
        core_requests: list[EngineCoreRequest] = []
        finished: dict[str, RequestOutput] = {}
        if show_progress is None:
            show_progress = len(listed) > 1 and sys.stderr.isatty()
        try:
            for request in processed:
                core_requests += self._outputs.add_request(request)
            if self._is_paced:
                core_requests.sort(key=lambda request: longest_first(request.sampling_params))
            with (
                _ProgressBar(len(listed), is_shown=show_progress) as bar,
                _InterruptAfterStep() as interrupt,
            ):
                waiting = iter(core_requests)
                while len(finished) < len(processed):
                    # The engine's queue is bounded; what does not fit yet waits here.
                    for core_request in itertools.islice(waiting, self._client.num_free_places):
                        self._client.add_request(core_request)
                    assert self._client.has_work, "requests that the engine does not know"
                    result = self._outputs.process(self._client.get_outputs())
                    self._client.abort_requests(result.abort_request_ids)
                    for error in result.errors.values():
                        raise error
                    for output in result.outputs:
                        finished[output.request_id] = output
                        bar.advance(output.num_output_tokens)
                    interrupt.check()
        finally:
            # After an error or Ctrl-C nothing of this call may run on into the next one.
            left = [request_id for request_id in request_ids if request_id not in finished]
            self._client.abort_requests(self._outputs.remove_requests(left))
        return [finished[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one chat or of many, by the model's own template."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        chats: Sequence[Any] = [messages] if is_one else messages
        prompts = [self._inputs.render_chat(chat, **template_variables) for chat in chats]
        return self.generate(prompts, sampling_params, show_progress=show_progress)

    def collective_rpc(
        self,
        name: str,
        argument: object = None,
        *,
        result_type: type[T] | None = None,
        timeout_s: float | None = None,
    ) -> list[HookOutcome[T]]:
        """Run a function on every rank: "memory_report", or one that `hooks=["module:function"]` has named.

        argument:    anything that msgpack carries; the hook gets it in the type of its own annotation
        result_type: what each result is made into; None: plain lists, dicts, numbers and text
        Returns one outcome per rank, each a result or an error: an error in the function ends nothing but this call.
        Raises ValueError for an unknown name, ReplicaLostError.
        """
        return self._client.collective_rpc(name, argument, result_type=result_type, timeout_s=timeout_s)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while any request holds blocks."""
        return self._client.reset_prefix_cache()

    def close(self) -> None:
        """Free the model and end its processes. Idempotent."""
        self._client.close(reason="closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _InterruptAfterStep:
    """Keeps Ctrl-C out of the middle of a step, where it would part scheduler and workers for good.

    Does nothing outside the main thread, or where the program has a SIGINT handler of its own. A second Ctrl-C
    interrupts at once.
    """

    def __init__(self) -> None:
        self._is_interrupted = False
        self._is_installed = False

    def __enter__(self) -> Self:
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_default and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._on_signal)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt when Ctrl-C was pressed. Called between two steps."""
        if self._is_interrupted:
            raise KeyboardInterrupt

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.check()
        self._is_interrupted = True


class _ProgressBar:
    """Requests done and output tokens per second, on standard error."""

    def __init__(self, num_requests: int, *, is_shown: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[tokens_per_s]:.0f} tokens/s"),
            disable=not is_shown,
        )
        self._task = self._progress.add_task("requests", total=num_requests, tokens_per_s=0.0)
        self._num_tokens = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, num_tokens: int) -> None:
        """Count one finished request."""
        self._num_tokens += num_tokens
        elapsed_s = self._progress.tasks[0].elapsed or 0.0
        rate = self._num_tokens / elapsed_s if elapsed_s > 0 else 0.0
        self._progress.update(self._task, advance=1, tokens_per_s=rate)


def _suit_scheduler(config: EngineConfig, report: ExecutorReport) -> SchedulerConfig:
    """Change what depends on the ranks, and on all requests being there from the beginning."""
    scheduler, rank = config.scheduler, report.ranks[0]
    if rank.device == "cpu":
        # A step is computed where it is submitted: to plan ahead would only waste the step after each end.
        return dataclasses.replace(scheduler, max_steps_in_flight=1) if _is_in_process(config) else scheduler
    if scheduler.paced_step_tokens is None and rank.weight_bytes >= PACED_WEIGHT_BYTES:
        return dataclasses.replace(scheduler, paced_step_tokens=PACED_STEP_TOKENS)
    return scheduler


def _create_executor(config: EngineConfig) -> Executor:
    return create_executor(
        model=config.model,
        cache=config.cache,
        parallel=config.parallel,
        executor=config.executor,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        in_process=_is_in_process(config),
    )


def _is_in_process(config: EngineConfig) -> bool:
    return config.parallel.tensor_parallel_size == 1


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from many: text and a flat list of ids are one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _match_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if len(sampling_params) != num_prompts:
        raise ValueError(f"{len(sampling_params)} sampling_params for {num_prompts} prompts")
    return list(sampling_params)
