"""Writes the slot table that engines read.

Invariant: the generation of a slot is written before anything else of its record, and READY only after all the rest.
"""

from __future__ import annotations

import struct

from kvpool_core.slot_table import (
    CHECKSUM_OFFSET,
    FLAGS_OFFSET,
    GENERATION_OFFSET,
    HEADER_BYTES,
    LEASE_OFFSET,
    RECENCY_OFFSET,
    RECORD_BYTES,
    STATE_OFFSET,
    SlotRecord,
    pack_record,
)

_U64 = struct.Struct("<Q")


class SlotWriter:
    """Field-wise writer over a table's buffer: the hot path touches 8 bytes where it can."""

    def __init__(self, table: memoryview) -> None:
        self._table = table

    def record(self, index: int, record: SlotRecord) -> None:
        """Write a whole record."""
        pack_record(self._table, index, record)

    def generation(self, index: int, generation: int) -> None:
        """Write the generation alone: readers of the former one now fail their check."""
        _U64.pack_into(self._table, HEADER_BYTES + index * RECORD_BYTES + GENERATION_OFFSET, generation)

    def lease(self, index: int, lease_until_ns: int) -> None:
        """Write how long the slot is leased; 0 = not at all."""
        _U64.pack_into(self._table, HEADER_BYTES + index * RECORD_BYTES + LEASE_OFFSET, lease_until_ns)

    def recency(self, index: int, recency: int) -> None:
        """Write when the block was last asked for, as a counter."""
        _U64.pack_into(self._table, HEADER_BYTES + index * RECORD_BYTES + RECENCY_OFFSET, recency)

    def state(self, index: int, state: int) -> None:
        """Write the state alone."""
        self._table[HEADER_BYTES + index * RECORD_BYTES + STATE_OFFSET] = state

    def checksum(self, index: int, checksum: int, flags: int) -> None:
        """Write the checksum, then the flags that say whether it counts."""
        base = HEADER_BYTES + index * RECORD_BYTES
        _U64.pack_into(self._table, base + CHECKSUM_OFFSET, checksum)
        self._table[base + FLAGS_OFFSET] = flags

    def read_generation(self, index: int) -> int:
        """The generation last written for a slot; 0 when it was never used."""
        (generation,) = _U64.unpack_from(self._table, HEADER_BYTES + index * RECORD_BYTES + GENERATION_OFFSET)
        return int(generation)
