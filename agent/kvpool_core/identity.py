"""The domain: the compatibility fingerprint under which blocks may be exchanged.

Invariant: two engines get the same domain only when a block stored by one is a correct block for the other.
The scheduler and every worker each describe their part; the agent combines them once all parts are there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import cbor2

DOMAIN_FORMAT_VERSION = 1
DOMAIN_BYTES = 16


def canonical(value: object) -> bytes:
    """Canonical CBOR: equal values give equal bytes on every machine."""
    return cbor2.dumps(value, canonical=True)


def digest(value: object) -> bytes:
    """BLAKE2b-128 (16 bytes) of the canonical encoding of `value`."""
    return hashlib.blake2b(canonical(value), digest_size=DOMAIN_BYTES).digest()


def combine(*, scheduler_part: bytes, shared_part: bytes, rank_parts: Sequence[bytes]) -> bytes:
    """The domain (16 bytes) of an engine.

    scheduler_part: digest of what the scheduler process knows (model, weights, hashing, cache configuration).
    shared_part: digest that every worker reports alike (canonical page encoding).
    rank_parts: one per rank in rank order, each b"" when the rank's mapping does not depend on the parallel layout,
    so that engines of another tensor parallel size share the domain exactly when their payloads are interchangeable.
    """
    ranks: list[bytes] = list(rank_parts) if any(rank_parts) else []
    return digest(["kvpool-domain", DOMAIN_FORMAT_VERSION, scheduler_part, shared_part, ranks])


def derive(domain: bytes, *, kind: str, content: bytes) -> bytes:
    """A domain inside `domain`: for a LoRA adapter (kind "lora", its content digest) or one process (kind "private")."""
    return digest(["kvpool-derived", DOMAIN_FORMAT_VERSION, domain, kind, content])
