"""How long a decision takes: the scoring of replicas, and the look-up of a prompt's blocks. On this machine's clock.

Called by: the benchmark's command. The fastest of many rounds counts: what slows a round down is not the code.
"""

import time
from collections.abc import Callable, Sequence

from ....cluster.front_end_board import NUM_COLUMNS, FrontEndBoard, Unreported
from ....cluster.load_balancer import Balancer
from ....cluster.load_book import LoadBook
from ....cluster.prefix_index import PrefixIndex
from ....cluster.routing import RoutingPolicy, RoutingRequest
from ....engine.messages import EngineStats
from ....engine.prefix_log import PrefixLog
from ....shm.number_table import NumberTable
from ..report import Table, show_number
from .load import number_key

SIZES = (8, 64)
_FRONT_ENDS = 4
_NUM_ROUNDS = 1000
_NUM_TURNS = 20
_ROUND = 5
_NUM_BLOCKS = 1000


def decision_table() -> Table:
    """Time both, for each number of replicas in `SIZES`."""
    calls = [
        call for size in SIZES for call in (_scoring(size, 1), _scoring(size, _FRONT_ENDS), _look_up(size))
    ]
    times = iter(_fastest_us(calls))
    rows = [
        [
            str(size),
            show_number(next(times)),
            show_number(next(times)),
            show_number(next(times) / _NUM_BLOCKS),
        ]
        for size in SIZES
    ]
    return Table(
        title="Time of a decision of prefix_aware, µs",
        columns=["replicas", "scoring", f"one of {_FRONT_ENDS} front ends", "look-up, a block"],
        rows=rows,
        note=f"The fastest of {_NUM_ROUNDS} rounds. Scoring: loads, costs, choice; with several front ends also what "
        f"the others say of theirs. Look-up: a prompt of {_NUM_BLOCKS} blocks that every replica holds.",
    )


def _scoring(num_replicas: int, num_front_ends: int) -> Callable[[], object]:
    table = NumberTable.private(num_front_ends, NUM_COLUMNS)
    board, *others = (FrontEndBoard(table, client_index) for client_index in range(num_front_ends))
    book = LoadBook()
    for dp_rank in range(num_replicas):
        book.join(dp_rank)
        book.report(
            EngineStats(
                dp_rank=dp_rank,
                epoch=0,
                sequence=1,
                reported_at=0.0,
                num_waiting=1,
                num_running=20 + dp_rank % 5,
                num_prefill_tokens=1000 + 37 * dp_rank,
                kv_usage=0.3,
                num_free_blocks=20_000,
                num_free_tokens=320_000,
                num_blocks=40_000,
                num_running_tokens=30_000 + 111 * dp_rank,
            )
        )
        for other in others:
            other.set_unreported(dp_rank, Unreported(prefill_tokens=400, num_requests=1, num_tokens=900))
    balancer = Balancer(RoutingPolicy.PREFIX_AWARE, max_num_batched_tokens=2048)
    ready = list(range(num_replicas))
    request = RoutingRequest(num_prompt_tokens=3000, num_cached_tokens={num_replicas // 2: 1000})

    def decide() -> None:
        loads = book.loads(ready, 1.0, board.unreported_elsewhere(num_replicas))
        balancer.choose(request, loads, book.step_cost.cost, book.mean_output_tokens)

    return decide


def _look_up(num_replicas: int) -> Callable[[], object]:
    index = PrefixIndex()
    keys = [number_key(number) for number in range(_NUM_BLOCKS)]
    for dp_rank in range(num_replicas):
        index.apply(dp_rank, PrefixLog(epoch=0).follow(()))
        index.expect(dp_rank, keys)
    return lambda: index.match(keys)


def _fastest_us(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Time all calls by turns, so that each meets the quiet moments of the machine."""
    fastest_s = [float("inf")] * len(calls)
    for _ in range(_NUM_TURNS):
        for index, call in enumerate(calls):
            for _ in range(_NUM_ROUNDS // _NUM_TURNS):
                began_at = time.perf_counter()
                for _ in range(_ROUND):
                    call()
                fastest_s[index] = min(fastest_s[index], time.perf_counter() - began_at)
    return [seconds / _ROUND * 1e6 for seconds in fastest_s]
