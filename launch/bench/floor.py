"""The least time that a workload can take on one device: bytes and operations that no program can save. Pure.

Called by: the offline benchmarks, which print how near a run came. Kernels run one after another, so the floor is a sum
over parts of max(bytes / read rate, operations / matrix rate):

    prefill matmuls   2 operations for each weight and token; the head only for the last token of each prompt
    prefill attention 4 operations for each query element and visible key (causal: half of all pairs)
    decode matmuls    all weights once a step, or their operations, whichever takes longer
    decode attention  keys and values of every running request once a step

The embedding table is looked up by rows, and counts for nothing unless the head shares it. Prefill that shares a step
with decoding is counted apart, and so is the activation traffic: both make the floor a little lower than the truth.
"""

from collections.abc import Sequence

import msgspec

from ...workers.transformer_config import TransformerConfig

BYTES_PER_NUMBER = {"bfloat16": 2, "float16": 2, "float32": 4}


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """What a device was measured to do at most: bytes read per second, operations per second of its matrix product."""

    read_bytes_per_s: float
    matmul_flops: float


class ModelCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of one model must read and compute.

    layer_weights, head_weights:     numbers in all layers' matrices; in the output head
    attention_ops:                   operations for one query and one visible key, all layers
    kv_bytes_per_token, number_bytes: of the cache; of one weight
    """

    layer_weights: int
    head_weights: int
    attention_ops: int
    kv_bytes_per_token: int
    number_bytes: int


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each part."""

    prefill_s: float
    decode_matmul_s: float
    decode_kv_s: float

    @property
    def total_s(self) -> float:
        """All parts."""
        return self.prefill_s + self.decode_matmul_s + self.decode_kv_s


def model_cost(config: TransformerConfig, dtype: str) -> ModelCost:
    """Count a dense model. dtype: of weights and cache, one of BYTES_PER_NUMBER (KeyError)."""
    query_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    number_bytes = BYTES_PER_NUMBER[dtype]
    return ModelCost(
        layer_weights=config.num_layer_weights,
        head_weights=config.vocab_size * config.hidden_size,
        attention_ops=4 * query_size * config.num_hidden_layers,
        kv_bytes_per_token=2 * kv_size * config.num_hidden_layers * number_bytes,
        number_bytes=number_bytes,
    )


def workload_floor(
    cost: ModelCost, ceilings: Ceilings, prompt_lens: Sequence[int], output_lens: Sequence[int]
) -> Floor:
    """Floor of requests that all start together and run in one batch. The lists are parallel, lengths positive."""
    prefill_ops = 2 * cost.layer_weights * sum(prompt_lens) + 2 * cost.head_weights * len(prompt_lens)
    prefill_ops += sum(cost.attention_ops * length * (length + 1) // 2 for length in prompt_lens)
    weights = cost.layer_weights + cost.head_weights
    weight_read_s = weights * cost.number_bytes / ceilings.read_bytes_per_s
    decode_matmul_s = 0.0
    # The prompt's last token gives the first output token; each further one takes a decode step.
    for step in range(1, max(output_lens)):
        num_running = sum(length > step for length in output_lens)
        decode_matmul_s += max(weight_read_s, 2 * weights * num_running / ceilings.matmul_flops)
    # Step number n of a request attends to its prompt and n tokens.
    num_read = sum(
        (length - 1) * prompt_len + (length - 1) * length // 2
        for prompt_len, length in zip(prompt_lens, output_lens, strict=True)
    )
    return Floor(
        prefill_s=prefill_ops / ceilings.matmul_flops,
        decode_matmul_s=decode_matmul_s,
        decode_kv_s=num_read * cost.kv_bytes_per_token / ceilings.read_bytes_per_s,
    )
