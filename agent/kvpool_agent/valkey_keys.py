"""Names of blocks in Valkey.

Owns the key format `<prefix><domain>:<group>:{<block hash>}` with `:1` for part 1. Invariant: both parts of a block
have the same hash tag, so they lie in one slot of a cluster, and two different blocks never have the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

from valkey.crc import key_slot


@dataclass(frozen=True, slots=True)
class BlockKey:
    """A block: domain (16 bytes), KV-cache group, block hash (32 bytes)."""

    domain: bytes
    group: int
    block_hash: bytes


def part_name(prefix: str, key: BlockKey, part: int) -> bytes:
    """The Valkey key of a part (0 or 1) of a block."""
    suffix = f":{part}" if part else ""
    return f"{prefix}{key.domain.hex()}:{key.group}:{{{key.block_hash.hex()}}}{suffix}".encode()


def slot_of(key: BlockKey) -> int:
    """The cluster slot of both parts: CRC16 of the hash tag, modulo 16384."""
    slot: int = key_slot(key.block_hash.hex().encode())
    return slot
