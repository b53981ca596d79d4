"""Greedy output in fp32 equals `transformers`', whatever the width, the number of replicas and the batch.

Each cluster of the matrix answers all prompts alone and at once, streamed and not. `make test` runs a
sample of the matrix and fewer prompts alone; `make test-full` runs it whole.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.launch.embedded_model import ensure_default_model
from support.clients import ask
from support.launch import Cluster, running_cluster
from support.prompts import PREFILL_BUDGET, PROMPTS
from support.reference import greedy_texts

MAX_TOKENS = 16
MATRIX = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]
SAMPLE = {(3, 1, False), (2, 2, True)}
SAMPLED_ALONE = 5
"""Prompts that are also asked alone in `make test`: alone, a step costs the same as for all."""

CELLS = [
    pytest.param(
        (tp, dp, caching),
        marks=() if (tp, dp, caching) in SAMPLE else pytest.mark.full,
        id=f"tp{tp}-dp{dp}-{'cached' if caching else 'uncached'}",
    )
    for tp, dp in MATRIX
    for caching in (True, False)
]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return ensure_default_model(lambda what, part: None)


@pytest.fixture(scope="session")
def expected(smollm2: Path) -> list[str]:
    return greedy_texts(smollm2, PROMPTS, MAX_TOKENS)


@pytest.fixture(scope="module", params=CELLS)
def cluster(
    request: pytest.FixtureRequest,
    smollm2: Path,
    expected: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    tp, dp, caching = request.param
    arguments = [str(smollm2), "--tp", str(tp), "--dp", str(dp), "--device", "cpu", "--dtype", "float32"]
    arguments += ["--set", f"cache.enable_prefix_caching={str(caching).lower()}", *PREFILL_BUDGET]
    with running_cluster(tmp_path_factory.mktemp("cluster"), *arguments) as cluster:
        yield cluster


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_all_prompts_at_once(cluster: Cluster, expected: list[str], stream: bool) -> None:
    assert ask(cluster, PROMPTS, max_tokens=MAX_TOKENS, stream=stream, at_once=True) == expected


def test_some_prompts_alone(cluster: Cluster, expected: list[str]) -> None:
    some = slice(None, None, len(PROMPTS) // SAMPLED_ALONE)

    assert ask(cluster, PROMPTS[some], max_tokens=MAX_TOKENS, stream=False, at_once=False) == expected[some]


@pytest.mark.full
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_all_prompts_alone(cluster: Cluster, expected: list[str], stream: bool) -> None:
    assert ask(cluster, PROMPTS, max_tokens=MAX_TOKENS, stream=stream, at_once=False) == expected
