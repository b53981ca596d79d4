"""Which layers share a block table: KV cache groups. Pure, and the same on every rank.

Called by: memory.py lays the cache out by them, the Worker tells the engine their windows.

Layers that see the same tokens could share one table; layers with a window need theirs apart, because it lets go
of blocks that the others keep. All groups take their blocks from one pool, so all blocks have one size, and that
is why the groups have the same number of layers: a kind with many layers becomes several groups.

    Gemma 3 1B: 22 layers with a window, 4 without    group 0: full attention    4 layers
                                                      groups 1 to 6: window      4, 4, 4, 4, 4, 2 layers

Layer j of each group lives in tensor j: block b holds there the tokens of the one group that was given block b.
A request is given one block of each group for every `block_size` of its tokens.
"""

from collections import defaultdict
from dataclasses import dataclass

from .transformer_config import TransformerConfig

MAX_GROUPS = 16
"""Bounds what a step spends on tables; a kind with very few layers among many then wastes a part of its blocks."""
NEARLY_EQUAL = 1.25
"""Kinds whose numbers of layers differ by less become one group each: that wastes less than one table more costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers with one block table.

    window: tokens that a query of these layers sees at most, itself among them; None: all before it
    layers: their numbers in the model
    """

    window: int | None
    layers: tuple[int, ...]


def make_kv_cache_groups(config: TransformerConfig) -> tuple[KVCacheGroup, ...]:
    """Divide the layers of a model. Full attention comes first; a model with one kind of layers has one group."""
    kinds: dict[int | None, list[int]] = defaultdict(list)
    for layer in range(config.num_hidden_layers):
        kinds[config.window(layer)].append(layer)
    counts = [len(layers) for layers in kinds.values()]
    if max(counts) < NEARLY_EQUAL * min(counts):
        size = max(counts)
    else:
        size = max(min(counts), -(-config.num_hidden_layers // (MAX_GROUPS - len(counts))))
    return tuple(
        KVCacheGroup(window=window, layers=tuple(layers[first : first + size]))
        for window, layers in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0))
        for first in range(0, len(layers), size)
    )
