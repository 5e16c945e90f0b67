"""Layout of the slot table that the agent writes and engines map read-only.

One header page, then one fixed record per slot. Invariant: whenever a slot's payload may change, its generation has
changed before: a reader that sees the same generation and READY before and after its copy has copied one whole block.
All integers little-endian; times are CLOCK_MONOTONIC nanoseconds (one clock for all processes of a node).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"KVPSLOT1"
LAYOUT_VERSION = 1
HEADER_BYTES = 4096
RECORD_BYTES = 160

# States of a slot.
FREE = 0
WRITING = 1
"""Reserved; its owner's ranks are copying, or the agent is fetching into it."""
READY = 2
"""Holds a whole block; readable."""
QUARANTINED = 3
"""Was WRITING when its owner's connection was lost: not readable, not reusable until the owner is known to be done."""

# Flags of a slot.
CHECKSUM_VALID = 1
"""`checksum` is the xxh3-64 of the payload."""
UNVERIFIED = 2
"""Taken over from another agent process; the checksum is to be verified before the first HIT."""
PRIVATE = 4
"""Belongs to a private domain: never leaves the node."""

_HEADER = struct.Struct("<8sIIQ16s16sQ")
#                      generation, lease_until_ns, payload_offset, recency, checksum, owner,
#                      payload_bytes, group, position, state, flags, domain, block_hash, parent_hash
_RECORD = struct.Struct("<QQQQQQQIIBB6x16s32s32s")
assert _RECORD.size <= RECORD_BYTES and RECORD_BYTES % 8 == 0

GENERATION_OFFSET = 0
LEASE_OFFSET = 8
RECENCY_OFFSET = 24
CHECKSUM_OFFSET = 32
STATE_OFFSET = _RECORD.size - 32 - 32 - 16 - 8
FLAGS_OFFSET = STATE_OFFSET + 1


@dataclass(frozen=True, slots=True)
class TableHeader:
    """What a table says of itself. `records`: number of slots."""

    arena_id: bytes
    boot_id: bytes
    records: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One slot. `payload_offset` and `payload_bytes` place it in the arena; parent_hash is 32 zero bytes for a first block."""

    generation: int
    lease_until_ns: int
    payload_offset: int
    recency: int
    checksum: int
    owner: int
    payload_bytes: int
    group: int
    position: int
    state: int
    flags: int
    domain: bytes
    block_hash: bytes
    parent_hash: bytes


def table_bytes(records: int) -> int:
    """Size of a table with `records` slots, rounded up to 4 KiB pages."""
    return (HEADER_BYTES + records * RECORD_BYTES + 4095) // 4096 * 4096


def record_offset(slot: int) -> int:
    """Byte offset of a slot's record."""
    return HEADER_BYTES + slot * RECORD_BYTES


def pack_header(buffer: memoryview, header: TableHeader) -> None:
    """Write the header page."""
    _HEADER.pack_into(
        buffer,
        0,
        MAGIC,
        LAYOUT_VERSION,
        RECORD_BYTES,
        header.records,
        header.arena_id,
        header.boot_id,
        header.capacity_bytes,
    )


def unpack_header(buffer: memoryview) -> TableHeader | None:
    """The header, or None when this is not a table of this layout version or is shorter than it says."""
    if len(buffer) < HEADER_BYTES:
        return None
    magic, version, record_bytes, records, arena_id, boot_id, capacity = _HEADER.unpack_from(buffer, 0)
    if magic != MAGIC or version != LAYOUT_VERSION or record_bytes != RECORD_BYTES:
        return None
    if table_bytes(records) > len(buffer):
        return None
    return TableHeader(arena_id=arena_id, boot_id=boot_id, records=records, capacity_bytes=capacity)


def pack_record(buffer: memoryview, slot: int, record: SlotRecord) -> None:
    """Write a slot's record, the generation first."""
    offset = record_offset(slot)
    struct.pack_into("<Q", buffer, offset + GENERATION_OFFSET, record.generation)
    _RECORD.pack_into(
        buffer,
        offset,
        record.generation,
        record.lease_until_ns,
        record.payload_offset,
        record.recency,
        record.checksum,
        record.owner,
        record.payload_bytes,
        record.group,
        record.position,
        record.state,
        record.flags,
        record.domain,
        record.block_hash,
        record.parent_hash,
    )


def unpack_record(buffer: memoryview, slot: int) -> SlotRecord:
    """Read a slot's record."""
    return SlotRecord(*_RECORD.unpack_from(buffer, record_offset(slot)))


def read_state(buffer: memoryview, slot: int) -> tuple[int, int]:
    """(generation, state) of a slot: the pair that a reader checks before and after its copy."""
    offset = record_offset(slot)
    (generation,) = struct.unpack_from("<Q", buffer, offset + GENERATION_OFFSET)
    return generation, buffer[offset + STATE_OFFSET]
