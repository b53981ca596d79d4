"""The name of a full KV block: a chained hash over all tokens up to its end.

Called by: the front end, for the full blocks of a prompt, and KVCacheManager for those that come later. Pure; any
process that hashes the same tokens gets the same names.
Invariant: equal hashes mean equal prefixes. sha256, because a hash that a client can collide would hand
one client the KV of another; the encoding is unambiguous for the same reason.
"""

import hashlib
from array import array
from collections.abc import Sequence

ROOT_HASH = hashlib.sha256(b"phalanx block chain").digest()
"""Parent of the first block. A constant: processes that compare hashes must agree on it."""

ExtraKey = tuple[str, bytes]
"""What else the KV of a block depends on: a kind ("adapter", "salt") and its value."""


def extra_keys_of(cache_salt: str | None) -> tuple[ExtraKey, ...]:
    """Say what the KV of a request depends on beside its tokens."""
    return () if cache_salt is None else (("salt", cache_salt.encode()),)


def hash_block(parent_hash: bytes, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey] = ()) -> bytes:
    """Hash one full block.

    parent_hash: of the block before it, ROOT_HASH for the first
    extra_keys:  each is written with its kind and its lengths, so that two kinds with one value differ
    Returns 32 bytes.
    """
    digest = hashlib.sha256(parent_hash)
    digest.update(len(token_ids).to_bytes(4, "little"))
    digest.update(array("q", token_ids).tobytes())
    for kind, value in extra_keys:
        name = kind.encode()
        digest.update(len(name).to_bytes(4, "little") + name)
        digest.update(len(value).to_bytes(4, "little") + value)
    return digest.digest()


def extend_block_hashes(
    block_hashes: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    extra_keys: Sequence[ExtraKey] = (),
) -> None:
    """Append the hashes of the full blocks of `token_ids` that are not in `block_hashes` yet.

    extra_keys belong to the first block; the chain carries them to all others.
    Cost: O(new full blocks).
    """
    for index in range(len(block_hashes), len(token_ids) // block_size):
        parent_hash = block_hashes[-1] if index else ROOT_HASH
        block = token_ids[index * block_size : (index + 1) * block_size]
        block_hashes.append(hash_block(parent_hash, block, extra_keys if index == 0 else ()))
