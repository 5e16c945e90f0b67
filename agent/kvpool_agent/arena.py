"""The agent's view of the arena: payload mapped for reading and writing, and its own slot table.

Invariant: once an Arena exists its table is sealed: this process can write it, everybody else only read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvpool_agent.memfd import check_sealed, create_table, map_shared, seal_table
from kvpool_core.errors import ArenaError
from kvpool_core.slot_table import TableHeader, pack_header, table_bytes

MIN_PAYLOAD_BYTES = 16 << 10
"""One record per 16 KiB of capacity; smaller payloads run out of records first. Unused records cost no memory."""


def records_for(capacity_bytes: int) -> int:
    """Number of slots that an arena's table has."""
    return capacity_bytes // MIN_PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class ArenaFds:
    """Descriptors of an arena as the holder passes them: `old_table_fd` is the last agent's table, if any."""

    arena_id: bytes
    capacity_bytes: int
    huge_page_bytes: int
    payload_fd: int
    old_table_fd: int | None


class Arena:
    """Mappings and descriptors of one arena in one agent process."""

    def __init__(self, fds: ArenaFds, *, boot_id: bytes) -> None:
        """Map the payload and make a new, empty, sealed table; ArenaError when the payload is not what it should be."""
        check_sealed(fds.payload_fd, size_bytes=fds.capacity_bytes)
        self.arena_id = fds.arena_id
        self.capacity_bytes = fds.capacity_bytes
        self.huge_page_bytes = fds.huge_page_bytes
        self.payload_fd = fds.payload_fd
        self.records = records_for(fds.capacity_bytes)
        self._payload_map = map_shared(fds.payload_fd, fds.capacity_bytes)
        self.payload = memoryview(self._payload_map)
        self.table_fd, self.table = _new_table(fds, self.records, boot_id)

    def descriptors(self) -> tuple[int, int]:
        """What engines get with Welcome: payload and table."""
        return self.payload_fd, self.table_fd

    def block(self, offset: int, size_bytes: int) -> memoryview:
        """The bytes of one payload."""
        return self.payload[offset : offset + size_bytes]


def _new_table(fds: ArenaFds, records: int, boot_id: bytes) -> tuple[int, memoryview]:
    size = table_bytes(records)
    table_fd = create_table(size)
    try:
        table = memoryview(map_shared(table_fd, size))
        header = TableHeader(arena_id=fds.arena_id, boot_id=boot_id, records=records, capacity_bytes=fds.capacity_bytes)
        pack_header(table, header)
        seal_table(table_fd)
    except (OSError, ArenaError):
        os.close(table_fd)
        raise
    return table_fd, table
