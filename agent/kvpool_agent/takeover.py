"""Reads the former agent's slot table and decides what of it lives on.

Invariant: a record of the former table whose payload might still change, or cannot be proven, never becomes readable.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvpool_agent.memfd import check_sealed
from kvpool_core.errors import ArenaError
from kvpool_core.slot_table import (
    CHECKSUM_VALID,
    FREE,
    QUARANTINED,
    READY,
    UNVERIFIED,
    SlotRecord,
    unpack_header,
    unpack_record,
)

AGENT_OWNER = 0
"""Owner of slots that an agent itself is filling, without a lease: it is dead when another one takes over."""


@dataclass(slots=True)
class Takeover:
    """What to carry into the new table. `generations`: highest generation seen per slot, for slots that start FREE."""

    ready: list[tuple[int, SlotRecord]] = field(default_factory=list)
    quarantined: list[tuple[int, SlotRecord]] = field(default_factory=list)
    generations: dict[int, int] = field(default_factory=dict)
    dropped: int = 0


def read_old_table(fd: int, arena_id: bytes) -> Iterator[tuple[int, SlotRecord]] | None:
    """The former table's used records in order, or None when it is not a table of this arena and layout."""
    try:
        size = check_sealed(fd)
        table = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
    except (ArenaError, OSError, ValueError):
        return None
    header = unpack_header(table)
    if header is None or header.arena_id != arena_id:
        return None
    return _records(table, header.records)


def _records(table: memoryview, records: int) -> Iterator[tuple[int, SlotRecord]]:
    """Slots are numbered from 0 as they are first needed, so the first one without a generation ends the used ones."""
    for index in range(records):
        record = unpack_record(table, index)
        if not record.generation:
            return
        yield index, record


def decide(records: Iterator[tuple[int, SlotRecord]], now_ns: int) -> Takeover:
    """Sort records: READY with a checksum lives on unverified; what an engine may still read or write stays untouched
    until its lease ends; the rest is free.
    """
    result = Takeover()
    for index, record in records:
        result.generations[index] = record.generation
        held = record.lease_until_ns > now_ns
        if record.state == READY and record.flags & CHECKSUM_VALID:
            lease_until_ns = record.lease_until_ns if held else 0
            flags = record.flags | UNVERIFIED
            result.ready.append((index, replace(record, flags=flags, lease_until_ns=lease_until_ns)))
        elif record.state != FREE and held:
            result.quarantined.append((index, replace(record, state=QUARANTINED)))
        result.dropped += record.state == READY and not record.flags & CHECKSUM_VALID
    return result
