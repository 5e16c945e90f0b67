"""vLLM's chained `sha256_cbor` block hash, recomputed outside the engine.

Invariant: for equal tokens, extra keys and seed the digests equal vLLM's (golden vectors made by the real vLLM).
Source: vLLM 0.32 `v1/core/kv_cache_utils.py` (`hash_block_tokens`, `init_none_hash`), `utils/hashing.py` (`sha256_cbor`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import cbor2

DEFAULT_HASH_SEED = "vllm-none-hash"
"""Seed that vLLM uses for cryptographic hashes when PYTHONHASHSEED is not set."""

HASH_BYTES = 32

ExtraKeys = tuple[tuple[str | int, ...], ...]


def sha256_cbor(value: object) -> bytes:
    """SHA-256 (32 bytes) of the canonical CBOR encoding of `value`."""
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def none_hash(seed: str = DEFAULT_HASH_SEED) -> bytes:
    """The parent of every first block: 32 bytes derived from the engine's hash seed."""
    return sha256_cbor(seed)


def block_hashes(
    token_ids: Sequence[int],
    *,
    block_size: int,
    seed: str = DEFAULT_HASH_SEED,
    cache_salt: str | None = None,
    lora: tuple[str, str] | None = None,
) -> Iterator[bytes]:
    """Yield the 32-byte hash of each full block of `block_size` tokens.

    `cache_salt` enters the first block only, `lora` (name, path) every block; the order is vLLM's: lora, then salt.
    Multimodal requests are not reproduced here: their identifiers exist only after the engine's own processing.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1 token, is {block_size}")
    parent = none_hash(seed)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        extra: list[tuple[str | int, ...]] = []
        if lora is not None:
            extra.append(("lora", *lora))
        if cache_salt and start == 0:
            extra.append(("cache_salt", cache_salt))
        tokens = tuple(token_ids[start : start + block_size])
        parent = sha256_cbor((parent, tokens, tuple(extra) or None))
        yield parent


def short_hash(block_hash: bytes) -> int:
    """The low 8 bytes of a block hash as an unsigned integer: how events and the router's index name a block."""
    return int.from_bytes(block_hash[-8:], "big")
