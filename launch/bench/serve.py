"""`cluster-bench serve`: load on any OpenAI-compatible server, and what its clients feel of it.

Called by: cli.py. One process, one event loop. Fixed concurrency (`--concurrency`) keeps that many requests under
way; an open loop (`--rate`, or a trace's own arrivals) sends each when it is due, however slow the server is. With
several targets, each run measures one after the other, with the same requests; each run has requests of its own, so
that no prefix cache answers for a run before.

When a server dies: its requests fail, and are counted by kind.
"""

import argparse
import asyncio
import gc
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from ...engine.tokenizer import Tokenizer, load_tokenizer
from .errors import BenchError
from .http_client import HttpClient
from .openai_client import Endpoint, OpenAIClient, RequestRecord, find_model
from .options import positive
from .progress import Progress
from .report import ReportWriter
from .serve_metrics import Objectives, ServeRun, make_tables, measure_run
from .traces import SHAPES, TraceRequest, parse_trace, synthesize_trace
from .workload import RequestSpec, fit_trace, make_requests, random_trace, scaled, with_arrivals

NAME = "serve"
HELP = "load on an OpenAI-compatible server: time to first token, between tokens, throughput, goodput"
_WARM_UP_SEED = -1
_SHOW_EVERY_S = 0.5


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server and what it is called in the tables."""

    name: str
    url: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", dest="targets", action="append", type=_target, metavar="[NAME=]URL",
                       help="server; may be repeated (http://127.0.0.1:8000)")  # fmt: skip
    group.add_argument("--endpoint", type=Endpoint, choices=list(Endpoint), default=Endpoint.COMPLETIONS,
                       help="completions or chat (completions)")  # fmt: skip
    group.add_argument("--model", metavar="NAME", help="as the server calls it; none: the first it names")
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token; seen in process lists")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the key")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one request (600)")
    group = parser.add_argument_group("load")
    group.add_argument(
        "--num-requests", type=positive, metavar="N", help="in each run (100, or the whole trace)"
    )
    group.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help="most requests under way at once; without --rate, arrivals do not count",
    )
    group.add_argument("--rate", type=float, metavar="R", help="arrivals per second: an open loop")
    group.add_argument("--burstiness", type=float, default=1.0, metavar="CV",
                       help="unevenness of arrivals: variation of their gaps; 1: Poisson (1)")  # fmt: skip
    group.add_argument("--speed", type=float, default=1.0, metavar="X", help="how fast a trace runs (1)")
    group.add_argument("--warmup", type=int, default=4, metavar="N", help="requests before each run (4)")
    group.add_argument("--repetitions", type=positive, default=3, metavar="N", help="runs (3)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random (0)")
    group = parser.add_argument_group("requests")
    group.add_argument("--input-len", type=positive, default=128, metavar="N", help="prompt tokens (128)")
    group.add_argument("--output-len", type=positive, default=64, metavar="N", help="output tokens (64)")
    group.add_argument("--range-ratio", type=float, default=0.0, metavar="R",
                       help="lengths vary by this part of them (0)")  # fmt: skip
    group.add_argument("--shared-prefix-len", type=int, default=0, metavar="N",
                       help="tokens with which all prompts begin, in steps of 512 (0)")  # fmt: skip
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="lengths and arrivals: Azure's CSV, Mooncake's JSONL"
    )
    group.add_argument("--synthetic-trace", choices=sorted(SHAPES), metavar="NAME",
                       help=f"made-up trace with the statistics of {', '.join(sorted(SHAPES))}")  # fmt: skip
    group.add_argument(
        "--max-model-len", type=positive, metavar="N", help="leave longer requests of a trace out"
    )
    group.add_argument("--tokenizer", type=Path, metavar="FOLDER",
                       help="send text made with it; without: token ids")  # fmt: skip
    group.add_argument(
        "--vocab-size", type=positive, metavar="N", help="of token ids (the tokenizer's, or 10000)"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of sampling (0)")
    group.add_argument("--stop-at-eos", action="store_true",
                       help="let the model end earlier: do not send ignore_eos")  # fmt: skip
    group = parser.add_argument_group("objectives, ms")
    for name in ("ttft", "tpot", "e2e"):
        group.add_argument(
            f"--max-{name}", type=float, metavar="MS", help=f"{name.upper()} of a good request"
        )


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises BenchError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runs = runner.run(_measure(arguments))
    notes = [
        f"load: {_describe_load(arguments)}",
        "each run has requests of its own; servers of one run get the same ones, one server after the other",
    ]
    writer.finish(
        benchmark="serve: load on an OpenAI-compatible server",
        num_runs=arguments.repetitions,
        tables=make_tables(runs),
        runs=runs,
        out=sys.stdout,
        notes=notes,
    )


def make_trace(arguments: argparse.Namespace, seed: int) -> list[TraceRequest]:
    """Make the lengths and arrivals that the flags ask for. Raises BenchError."""
    if arguments.trace is not None:
        trace = fit_trace(
            parse_trace(arguments.trace.read_text(encoding="utf-8")),
            arguments.num_requests,
            max_model_len=arguments.max_model_len,
        )
    elif arguments.synthetic_trace is not None:
        count = arguments.num_requests or 100
        # Some will be too long.
        made = synthesize_trace(SHAPES[arguments.synthetic_trace], 20 * count, seed)
        trace = fit_trace(made, count, max_model_len=arguments.max_model_len)
    else:
        trace = random_trace(
            arguments.num_requests or 100,
            num_prompt_tokens=arguments.input_len,
            num_output_tokens=arguments.output_len,
            range_ratio=arguments.range_ratio,
            num_shared_tokens=arguments.shared_prefix_len,
            seed=seed,
        )
    if arguments.rate is not None:
        return with_arrivals(trace, arguments.rate, cv=arguments.burstiness, seed=seed)
    return scaled(trace, arguments.speed)


async def send_all(
    client: OpenAIClient,
    requests: Sequence[RequestSpec],
    *,
    concurrency: int | None,
    is_open_loop: bool,
    progress: Progress,
) -> list[RequestRecord]:
    """Send all requests and wait for their ends. Returns their records in order.

    is_open_loop: send each when it is due; else as soon as one of `concurrency` places is free. In an open loop
                  `concurrency` limits what is under way, and a request that waits for a place is sent late
    """
    bodies = [client.encode(request) for request in requests]
    places = asyncio.Semaphore(concurrency or len(requests))
    records: list[RequestRecord] = []
    # Prompts are many small objects; a collection that walks them would stop the loop for milliseconds.
    gc.collect()
    gc.freeze()
    began_at = shown_at = time.perf_counter()

    async def send(request: RequestSpec, body: bytes, due_at: float) -> None:
        nonlocal shown_at
        try:
            records.append(await client.run(request.index, body, due_at))
        finally:
            places.release()
        progress.advance()
        if time.perf_counter() - shown_at > _SHOW_EVERY_S:
            shown_at = time.perf_counter()
            tokens = sum(record.num_output_tokens for record in records)
            progress.show(f"{tokens / (shown_at - began_at):.0f} output tokens/s")

    try:
        async with asyncio.TaskGroup() as tasks:
            for request, body in zip(requests, bodies, strict=True):
                if is_open_loop:
                    due_at = began_at + request.arrival_s
                    await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
                    await places.acquire()
                else:
                    await places.acquire()
                    due_at = time.perf_counter()
                tasks.create_task(send(request, body, due_at))
    finally:
        gc.unfreeze()
    return sorted(records, key=lambda record: record.index)


async def _measure(arguments: argparse.Namespace) -> list[ServeRun]:
    targets = arguments.targets or [Target(name="server", url="http://127.0.0.1:8000")]
    if len({target.name for target in targets}) < len(targets):
        raise BenchError("several --url need names of their own: NAME=URL")
    tokenizer = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
    if arguments.endpoint is Endpoint.CHAT and tokenizer is None:
        raise BenchError("chat needs text: give --tokenizer")
    objectives = Objectives(ttft=arguments.max_ttft, tpot=arguments.max_tpot, e2e=arguments.max_e2e)
    runs = []
    for number in range(arguments.repetitions):
        seed = arguments.seed + number
        requests = _requests(arguments, make_trace(arguments, seed), seed, tokenizer)
        # Another one goes first in each run.
        start = number % len(targets)
        for target in targets[start:] + targets[:start]:
            records = await _run_target(arguments, target, requests, number, tokenizer)
            runs.append(measure_run(records, run=number, target=target.name, objectives=objectives))
    return runs


async def _run_target(
    arguments: argparse.Namespace,
    target: Target,
    requests: Sequence[RequestSpec],
    number: int,
    tokenizer: Tokenizer | None,
) -> list[RequestRecord]:
    http = HttpClient(target.url, _headers(arguments))
    try:
        client = OpenAIClient(
            http,
            endpoint=arguments.endpoint,
            model=arguments.model or await find_model(http),
            ignore_eos=not arguments.stop_at_eos,
            temperature=arguments.temperature,
            timeout_s=arguments.timeout,
        )
        title = f"run {number + 1}, {target.name}"
        warm_up = _warm_up(arguments, tokenizer, number)
        with Progress(title, len(requests) + len(warm_up)) as progress:
            progress.say(f"{title}: {len(warm_up)} requests to warm up, {len(requests)} to measure")
            if warm_up:
                await send_all(
                    client, warm_up, concurrency=arguments.concurrency, is_open_loop=False, progress=progress
                )
            return await send_all(
                client,
                requests,
                concurrency=arguments.concurrency,
                is_open_loop=arguments.rate is not None or _has_own_arrivals(arguments),
                progress=progress,
            )
    finally:
        await http.close()


def _requests(
    arguments: argparse.Namespace, trace: Sequence[TraceRequest], seed: int, tokenizer: Tokenizer | None
) -> list[RequestSpec]:
    vocab_size = arguments.vocab_size or (tokenizer.vocab_size if tokenizer is not None else 10_000)
    return make_requests(trace, vocab_size=vocab_size, seed=seed, tokenizer=tokenizer)


def _warm_up(arguments: argparse.Namespace, tokenizer: Tokenizer | None, number: int) -> list[RequestSpec]:
    seed = _WARM_UP_SEED - arguments.seed - number
    trace = list(itertools.islice(make_trace(arguments, seed), max(0, arguments.warmup)))
    return _requests(arguments, trace, seed, tokenizer) if trace else []


def _has_own_arrivals(arguments: argparse.Namespace) -> bool:
    """A trace keeps its arrivals, unless only the concurrency was asked for."""
    is_trace = arguments.trace is not None or arguments.synthetic_trace is not None
    return is_trace and arguments.concurrency is None


def _headers(arguments: argparse.Namespace) -> dict[str, str]:
    key = arguments.api_key
    if arguments.api_key_file is not None:
        key = arguments.api_key_file.read_text(encoding="utf-8").strip()
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _describe_load(arguments: argparse.Namespace) -> str:
    if arguments.trace is not None:
        what = f"the trace {arguments.trace.name}"
    elif arguments.synthetic_trace is not None:
        what = f"a made-up trace with the statistics of {arguments.synthetic_trace}"
    else:
        what = f"{arguments.input_len} random tokens in, {arguments.output_len} out"
    if arguments.rate is not None:
        how = f"{arguments.rate:g} arrivals a second, variation of gaps {arguments.burstiness:g}"
    elif _has_own_arrivals(arguments):
        how = f"its own arrivals, {arguments.speed:g} times as fast"
    else:
        how = "as fast as places are free"
    limit = (
        f"at most {arguments.concurrency} under way"
        if arguments.concurrency
        else "no limit on those under way"
    )
    return f"{what}; {how}; {limit}"


def _target(text: str) -> Target:
    name, equals, url = text.partition("=")
    # A URL may hold "=" itself, but not before its scheme.
    return Target(name=name, url=url) if equals and "/" not in name else Target(name="server", url=text)
