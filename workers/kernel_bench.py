"""How long the kernels of a decode step take on this card, inside CUDA graphs: no launch from the host is in a figure.

Called by: launch/bench/kernels.py, in its own process, and from a shell on a machine that has torch and Triton only.
Caches and weights rotate, so that each launch finds its own cold, as a layer does; inputs are random numbers.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from .attention.backend import AttentionShape, SeenCache
from .attention.triton_backend import TritonAttention
from .kernels.triton_few_rows import is_faster, product_in_parts, product_of_few_rows, tuning_for_parts
from .kernels.triton_linear import MAX_ROWS, gemv, norm_gemv, silu_gemv
from .kernels.triton_norm import add_rms_norm

HEADS = ((16, 8), (32, 8), (32, 4))
LOADS = ((1, 128), (1, 384), (1, 1024), (1, 4096), (8, 1024), (64, 1024), (256, 512), (256, 1024))
WEIGHTS = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 4096), (4096, 4096), (4096, 14336))
WEIGHTS_BEFORE_NORMS = ((1024, 2048), (1024, 3072), (4096, 4096), (4096, 14336))
WEIGHTS_BEHIND_NORMS = ((4096, 1024), (6144, 1024), (6144, 4096))
FEW_ROWS = (8, 24, 40, 64)
HEAD_SIZE = 128
_READ_BYTES = 2 << 30
_COLD_BYTES = 256 << 20
"""Several times the second-level cache: what rotates takes as much."""
_REPLAYS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One kernel on one input. num_bytes: of keys and values, or of weights, read once."""

    kernel: str
    shape: str
    time_us: float
    num_bytes: int

    @property
    def bytes_per_s(self) -> float:
        """What was read in a second."""
        return self.num_bytes / self.time_us * 1e6


def read_ceiling() -> float:
    """Bytes that the card reads in a second when it sums up two large buffers."""
    buffers = [torch.randn(_READ_BYTES // 4, device="cuda") for _ in range(2)]
    return _READ_BYTES / time_in_graph_us([buffer.sum for buffer in buffers]) * 1e6


def measure_decode_attention(*, block_size: int) -> list[KernelTime]:
    """Time decode attention in bfloat16: our kernel, and FlashAttention-3's where it is installed."""
    times = []
    for num_rows, kv_len in LOADS:
        for num_heads, num_kv_heads in HEADS:
            times += _decode_times(num_rows, kv_len, num_heads, num_kv_heads, block_size)
    return times


def measure_small_products(rows: Sequence[int] = (1, 2, 4)) -> list[KernelTime]:
    """Time products of a few rows in bfloat16: our kernel, alone and with what may stand before it, and cuBLAS."""
    times = []
    for outputs, inputs in WEIGHTS:
        weights = _weights(outputs, inputs)
        for num_rows in rows:
            assert num_rows <= MAX_ROWS
            x, gate_up = _rows(num_rows, inputs), _rows(num_rows, 2 * inputs)
            norm = torch.ones(inputs, dtype=torch.bfloat16, device="cuda")
            runs: dict[str, Callable[[torch.Tensor], Any]] = {
                "gemv": partial(gemv, x),
                "norm_gemv": partial(norm_gemv, x, x, norm, 1e-6),
                "silu_gemv": partial(silu_gemv, gate_up),
                "cublas": partial(F.linear, x),
            }
            times += _product_times(num_rows, weights, runs)
    return times


def measure_products_and_norms(rows: Sequence[int] = FEW_ROWS) -> list[KernelTime]:
    """Time a product with the residual's sum and norm behind it: left in parts for it, and by cuBLAS."""
    times = []
    for outputs, inputs in WEIGHTS_BEFORE_NORMS:
        weights = _weights(outputs, inputs)
        norm = torch.ones(outputs, dtype=torch.bfloat16, device="cuda")
        for num_rows in rows:
            x, residual = _rows(num_rows, inputs), _rows(num_rows, outputs)
            tuning = tuning_for_parts(num_rows, outputs, inputs)
            assert tuning is not None
            products: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
                "in parts, norm": partial(product_in_parts, x, tuning=tuning),
                "cublas, norm": partial(F.linear, x),
            }
            runs = {
                name: partial(_product_and_norm, product, residual, norm)
                for name, product in products.items()
            }
            times += _product_times(num_rows, weights, runs)
    return times


def _product_and_norm(
    product: Callable[[torch.Tensor], torch.Tensor],
    residual: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    add_rms_norm(product(weight), residual, norm, 1e-6)


def measure_norms_and_products(rows: Sequence[int] = FEW_ROWS) -> list[KernelTime]:
    """Time a norm with a product behind it: by our kernel where it is used, and by cuBLAS."""
    times = []
    for outputs, inputs in WEIGHTS_BEHIND_NORMS:
        weights = _weights(outputs, inputs)
        norm = torch.ones(inputs, dtype=torch.bfloat16, device="cuda")
        for num_rows in rows:
            x, residual = _rows(num_rows, inputs), _rows(num_rows, inputs)
            products: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
                "norm, cublas": F.linear
            }
            if is_faster(num_rows, outputs, inputs):
                products["norm, few rows"] = product_of_few_rows
            runs = {
                name: partial(_norm_and_product, product, x, residual, norm)
                for name, product in products.items()
            }
            times += _product_times(num_rows, weights, runs)
    return times


def _norm_and_product(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    normalized, _ = add_rms_norm(x, residual, norm, 1e-6)
    product(normalized, weight)


def _weights(outputs: int, inputs: int) -> list[torch.Tensor]:
    """So many of one size that each is cold when its turn comes."""
    return [
        torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda")
        for _ in range(_num_cold(outputs * inputs * 2))
    ]


def _rows(num_rows: int, size: int) -> torch.Tensor:
    return torch.randn(num_rows, size, dtype=torch.bfloat16, device="cuda")


def _product_times(
    num_rows: int, weights: Sequence[torch.Tensor], runs: Mapping[str, Callable[[torch.Tensor], Any]]
) -> list[KernelTime]:
    """runs: by kernel, what is timed with each weight in turn."""
    outputs, inputs = weights[0].shape
    return [
        KernelTime(
            kernel=kernel,
            shape=f"{num_rows} × {inputs} → {outputs}",
            time_us=time_in_graph_us([partial(run, weight) for weight in weights]),
            num_bytes=weights[0].nbytes,
        )
        for kernel, run in runs.items()
    ]


def time_in_graph_us(runs: Sequence[Callable[[], Any]]) -> float:
    """Return the median time of one of `runs`, which a graph holds all of, over replays."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    samples = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(runs))
    return statistics.median(samples)


def _num_cold(num_bytes: int) -> int:
    return max(2, min(32, _COLD_BYTES // num_bytes + 1))


def _decode_times(
    num_rows: int, kv_len: int, num_heads: int, num_kv_heads: int, block_size: int
) -> list[KernelTime]:
    device, dtype = torch.device("cuda"), torch.bfloat16
    num_bytes = 2 * num_rows * kv_len * num_kv_heads * HEAD_SIZE * dtype.itemsize
    blocks_per_row = -(-kv_len // block_size)
    num_tables = _num_cold(num_bytes)
    num_blocks = num_tables * num_rows * blocks_per_row
    k_cache, v_cache = (
        torch.randn(num_blocks, block_size, num_kv_heads, HEAD_SIZE, dtype=dtype, device=device)
        for _ in range(2)
    )
    tables = torch.randperm(num_blocks, device=device).int().view(num_tables, num_rows, blocks_per_row)
    kv_lens = torch.full((num_rows,), kv_len, dtype=torch.int32, device=device)
    q = torch.randn(num_rows, num_heads, HEAD_SIZE, dtype=dtype, device=device)
    out, scale = torch.empty_like(q), HEAD_SIZE**-0.5
    backend = TritonAttention(
        AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=HEAD_SIZE,
            block_size=block_size,
            max_rows=num_rows,
            dtype=dtype,
            device=device,
        )
    )

    def see(table: torch.Tensor) -> SeenCache:
        return SeenCache(
            k_cache=k_cache, v_cache=v_cache, block_tables=table, kv_lens=kv_lens, scale=scale, window=None
        )

    runs: dict[str, Callable[[torch.Tensor], Any]] = {
        "triton": lambda table: backend.decode(q, see(table), out)
    }
    try:
        package: Any = import_module("flash_attn_interface")
    except ImportError:
        package = None
    if package is not None:
        runs["flash-attention-3"] = lambda table: package.flash_attn_with_kvcache(
            q.unsqueeze(1), k_cache, v_cache, page_table=table, cache_seqlens=kv_lens, causal=True
        )
    shape = f"{num_heads}/{num_kv_heads}, {num_rows} × {kv_len}"
    return [
        KernelTime(
            kernel=name,
            shape=shape,
            time_us=time_in_graph_us([partial(run, table) for table in tables]),
            num_bytes=num_bytes,
        )
        for name, run in runs.items()
    ]
