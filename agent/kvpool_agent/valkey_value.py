"""The format of a block's value in Valkey: a fixed header and the payload, cut in two where that saves memory.

Pure. Invariant: bytes are taken for a block's payload only if every header field is what this block must have and both
checksums are right; a single changed byte anywhere is noticed. A change of layout or cut is a new format version.

Header, little-endian, 96 bytes: magic 8, format version u16, part u8, parts u8, group u32, domain 16, block hash 32,
payload bytes of this part u64, of the whole block u64, xxh3-64 of this part's payload u64, of the whole payload u64.
(The last one keeps parts that two engines wrote at the same time from being joined.)
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvpool_agent.valkey_keys import BlockKey
from kvpool_core.errors import ValueFormatError

MAGIC = b"KVPOOLV\x01"
FORMAT_VERSION = 1
_HEADER = struct.Struct("<8sHBBI16s32sQQQQ")
HEADER_BYTES = _HEADER.size

ALLOCATOR_SLACK_BYTES = 64
"""Room that Valkey's own string header takes inside the allocation of a value."""
SMALLEST_CUT_BYTES = 16 * 1024
"""Below this a second key costs about what the cut saves."""
WORTHWHILE_SHARE = 32
"""A cut must save more than payload / 32."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """A block read back: its payload in pieces, in order, and the xxh3-64 of the whole."""

    pieces: tuple[memoryview, ...]
    checksum: int


@functools.lru_cache(maxsize=1024)
def part_sizes(total_bytes: int) -> tuple[int, ...]:
    """Payload bytes of each part (one or two) of a block of `total_bytes`.

    jemalloc rounds an allocation up to one of four sizes per doubling, so a value just above such an edge costs up to a
    quarter more memory: part 0 then fills the largest edge below, and the rest is part 1.
    """
    value_bytes = HEADER_BYTES + total_bytes
    if total_bytes < SMALLEST_CUT_BYTES:
        return (total_bytes,)
    edge = _edge_at_most(value_bytes)
    first = edge - ALLOCATOR_SLACK_BYTES - HEADER_BYTES
    rest = total_bytes - first
    cut_cost = edge + _edge_at_least(HEADER_BYTES + rest + ALLOCATOR_SLACK_BYTES)
    saved = _edge_at_least(value_bytes + ALLOCATOR_SLACK_BYTES) - cut_cost
    return (first, rest) if saved > total_bytes // WORTHWHILE_SHARE else (total_bytes,)


def build_headers(key: BlockKey, payload: memoryview, *, checksum: int | None = None) -> list[bytes]:
    """The header of each part of a block; part i's value is header i + the payload's i-th cut.

    checksum: what the payload had when the block was made; ValueFormatError when it has changed since.
    """
    sizes = part_sizes(len(payload))
    whole = checksum_of(payload)
    if checksum not in (None, whole):
        raise ValueFormatError("checksum", "the payload has changed since the block was made")
    headers, offset = [], 0
    for part, size in enumerate(sizes):
        own = whole if len(sizes) == 1 else checksum_of(payload[offset : offset + size])
        headers.append(
            _HEADER.pack(
                MAGIC, FORMAT_VERSION, part, len(sizes), key.group, key.domain, key.block_hash,
                size, len(payload), own, whole,
            )
        )  # fmt: skip
        offset += size
    return headers


def assemble(key: BlockKey, values: Sequence[bytes | bytearray | memoryview], total_bytes: int) -> Assembled:
    """The payload in the values of a block's parts; ValueFormatError when anything is not as it must be."""
    sizes = part_sizes(total_bytes)
    if len(values) != len(sizes):
        raise ValueFormatError("parts", f"{len(values)} values for a block of {len(sizes)} parts")
    digest = xxhash.xxh3_64()
    pieces, wholes = [], set()
    for part, value in enumerate(values):
        piece, whole = _parse_part(key, memoryview(value), part=part, sizes=sizes, total_bytes=total_bytes)
        digest.update(piece)
        pieces.append(piece)
        wholes.add(whole)
    checksum: int = digest.intdigest()
    if wholes != {checksum}:
        raise ValueFormatError("whole_checksum", "the parts are not of one block, or its checksum is wrong")
    return Assembled(pieces=tuple(pieces), checksum=checksum)


def checksum_of(data: memoryview | bytes) -> int:
    """xxh3-64."""
    digest: int = xxhash.xxh3_64_intdigest(data)
    return digest


def _parse_part(
    key: BlockKey, value: memoryview, *, part: int, sizes: tuple[int, ...], total_bytes: int
) -> tuple[memoryview, int]:
    """(payload, checksum of the whole block as the header says)."""
    if len(value) < HEADER_BYTES:
        raise ValueFormatError("truncated_header", f"{len(value)} bytes are shorter than a header of {HEADER_BYTES}")
    magic, version, own_part, parts, group, domain, block_hash, own_bytes, whole_bytes, own, whole = (
        _HEADER.unpack_from(value)
    )
    payload = value[HEADER_BYTES:]
    checks = (
        ("magic", magic == MAGIC),
        ("version", version == FORMAT_VERSION),
        ("domain", domain == key.domain),
        ("group", group == key.group),
        ("block_hash", block_hash == key.block_hash),
        ("parts", (own_part, parts) == (part, len(sizes))),
        ("length", (own_bytes, whole_bytes, len(payload)) == (sizes[part], total_bytes, sizes[part])),
    )
    for reason, is_right in checks:
        if not is_right:
            raise ValueFormatError(reason, f"the {reason} of part {part} is not that of the block that was asked for")
    if checksum_of(payload) != own:
        raise ValueFormatError("checksum", f"the payload of part {part} does not have its checksum")
    return payload, whole


def _edge_at_most(size: int) -> int:
    """Largest jemalloc size class <= size (size >= 8)."""
    step = 1 << (size.bit_length() - 3)
    return size // step * step


def _edge_at_least(size: int) -> int:
    """Smallest jemalloc size class >= size (size >= 9)."""
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step
