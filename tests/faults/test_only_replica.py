"""Requests that come around the death of the only replica, at every moment of it: each is answered whole.

One cluster of one replica for the whole file; each test leaves it whole again. Four clients ask without a pause, each
in its own way, from before the death until the replica is back.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from support.children import wait_until
from support.launch import TINY_MODEL, Cluster, running_cluster

PROMPT = "You may obtain a copy of the License at"
COMMON: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
KEY = "open sesame"
BACK_S = 60.0
DEATHS = {
    "core killed": ("dp0", signal.SIGKILL),
    "worker killed": ("dp0 tp0", signal.SIGKILL),
    "core asked to leave": ("dp0", signal.SIGTERM),
}

pytestmark = pytest.mark.timeout(200)

Ask = Callable[[AsyncOpenAI], Awaitable[str]]


async def complete(client: AsyncOpenAI) -> str:
    answer = await client.completions.create(model="tiny", prompt=PROMPT, **COMMON)
    assert answer.choices[0].finish_reason == "length"
    return answer.choices[0].text


async def stream_completion(client: AsyncOpenAI) -> str:
    chunks = await client.completions.create(model="tiny", prompt=PROMPT, stream=True, **COMMON)
    choices = [chunk.choices[0] async for chunk in chunks]
    assert choices[-1].finish_reason == "length"
    return "".join(choice.text for choice in choices)


async def chat(client: AsyncOpenAI) -> str:
    messages = [{"role": "user", "content": PROMPT}]
    answer = await client.chat.completions.create(model="tiny", messages=messages, **COMMON)
    assert answer.choices[0].finish_reason == "length"
    return answer.choices[0].message.content or ""


async def stream_chat(client: AsyncOpenAI) -> str:
    messages = [{"role": "user", "content": PROMPT}]
    chunks = await client.chat.completions.create(model="tiny", messages=messages, stream=True, **COMMON)
    choices = [chunk.choices[0] async for chunk in chunks]
    assert choices[-1].finish_reason == "length"
    assert sum(choice.delta.role is not None for choice in choices) == 1
    return "".join(choice.delta.content or "" for choice in choices)


WAYS: list[Ask] = [complete, stream_completion, chat, stream_chat]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "key").write_text(KEY)
    arguments = [str(TINY_MODEL), "--device", "cpu", "--served-model-name", "tiny"]
    arguments += ["--admin-key-file", str(folder / "key")]
    settings = ("cluster.max_restarts=100", "cluster.max_restart_backoff_s=0.5")
    with running_cluster(folder, *arguments, *(word for one in settings for word in ("--set", one))) as it:
        yield it


def client_of(cluster: Cluster) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=BACK_S)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[str]:
    async def run() -> list[str]:
        async with client_of(cluster) as client:
            return [await way(client) for way in WAYS]

    return asyncio.run(run())


def is_ready(cluster: Cluster) -> bool:
    return httpx.get(f"{cluster.url}/ready", timeout=BACK_S).status_code == 200


def ask_throughout(cluster: Cluster, strike: Callable[[], None]) -> list[list[str]]:
    """Ask in each way again and again, from before `strike` until the replica is back; return the texts of each way.

    What is asked while no replica serves is among it.
    """

    is_over = threading.Event()
    texts: list[list[str]] = [[] for _ in WAYS]

    async def ask_again_and_again(client: AsyncOpenAI, index: int) -> None:
        while not is_over.is_set():
            texts[index].append(await WAYS[index](client))

    async def ask_once(client: AsyncOpenAI, index: int) -> None:
        texts[index].append(await WAYS[index](client))

    def break_and_mend(ask_while_down: Callable[[], None]) -> None:
        wait_until(lambda: all(texts), timeout_s=BACK_S, what="the first answers")
        strike()
        wait_until(lambda: not is_ready(cluster), timeout_s=BACK_S, what="the loss of the replica")
        ask_while_down()
        wait_until(lambda: is_ready(cluster), timeout_s=BACK_S, what="the replica")

    async def run() -> None:
        hand_over = asyncio.get_running_loop().call_soon_threadsafe
        async with client_of(cluster) as client, asyncio.TaskGroup() as asking:

            def ask_while_down() -> None:
                for index in range(len(WAYS)):
                    asking.create_task(ask_once(client, index))

            for index in range(len(WAYS)):
                asking.create_task(ask_again_and_again(client, index))
            try:
                await asyncio.to_thread(break_and_mend, lambda: hand_over(ask_while_down))
            finally:
                is_over.set()

    asyncio.run(run())
    return texts


@pytest.mark.parametrize(
    "death",
    [
        "core killed",
        *(pytest.param(name, marks=pytest.mark.full) for name in DEATHS if name != "core killed"),
    ],
)
def test_whoever_asks_around_a_death_is_answered_whole(
    cluster: Cluster, undisturbed: list[str], death: str
) -> None:
    role, number = DEATHS[death]
    victim = cluster.pids()[f"phalanx {role}"]

    texts = ask_throughout(cluster, lambda: os.kill(victim, number))

    assert [set(of_one_way) for of_one_way in texts] == [{text} for text in undisturbed]


@pytest.mark.full
def test_whoever_asks_around_a_restart_by_wish_is_answered_whole(
    cluster: Cluster, undisturbed: list[str]
) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    done: list[int] = []

    def restart() -> None:
        answer = httpx.post(
            f"{cluster.url}/admin/replicas/0/restart", headers=headers, json={}, timeout=BACK_S
        )
        done.append(answer.status_code)

    thread = threading.Thread(target=restart)
    texts = ask_throughout(cluster, thread.start)
    thread.join(BACK_S)

    assert done == [200]
    assert [set(of_one_way) for of_one_way in texts] == [{text} for text in undisturbed]


@pytest.mark.full
def test_an_api_server_that_comes_back_while_no_replica_serves_lets_requests_wait(
    cluster: Cluster, undisturbed: list[str]
) -> None:
    pids = cluster.pids()
    for title in ("phalanx dp0", "phalanx api0"):
        os.kill(pids[title], signal.SIGKILL)

    async def run() -> list[str]:
        async with client_of(cluster) as client:
            return await asyncio.gather(*(way(client) for way in WAYS))

    # At once: the connections wait in the socket's queue for the new server, and the requests there for the replica.
    assert asyncio.run(run()) == undisturbed
    wait_until(lambda: is_ready(cluster), timeout_s=BACK_S, what="the replica")
