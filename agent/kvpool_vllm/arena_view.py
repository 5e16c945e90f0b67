"""An engine process's view of the node's arena: payload mapped read-write, slot table read-only.

Invariants: a slot is used only through `Placement`s that name the arena they belong to, another arena's never match; a view
that was closed locates nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

from kvpool_core import slot_table, wire
from kvpool_core.errors import ArenaError


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot as an agent named it: record index and generation, in the arena `arena_id`."""

    arena_id: bytes
    slot: int
    generation: int


class ArenaView:
    """Mappings of one arena, until `close`."""

    def __init__(self, welcome: wire.Welcome, payload_fd: int, table_fd: int) -> None:
        self.arena_id = welcome.arena_id
        self.capacity_bytes = welcome.capacity_bytes
        self._payload = _map(payload_fd, welcome.capacity_bytes, mmap.PROT_READ | mmap.PROT_WRITE, "payload")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._payload))
        self.replace_table(welcome, table_fd)

    def replace_table(self, welcome: wire.Welcome, table_fd: int) -> None:
        """Use the table of another agent process of the same arena."""
        mapping = _map(table_fd, os.fstat(table_fd).st_size, mmap.PROT_READ, "slot table")
        table = memoryview(mapping)
        header = slot_table.unpack_header(table)
        if header is None or header.arena_id != welcome.arena_id or header.capacity_bytes != welcome.capacity_bytes:
            raise ArenaError("the agent's slot table is not of this arena or of another layout version")
        self._table, self._records = table, header.records

    def close(self) -> None:
        """Unmap. Only when no copy uses an address of this view any more: such a copy would kill the process."""
        self._records = 0
        self._table.release()
        self._payload.close()

    def locate(self, placement: Placement, payload_bytes: int, *, state: int) -> int | None:
        """Address of the slot's payload while the slot is what the placement says and in `state`; else None."""
        if placement.arena_id != self.arena_id or not 0 <= placement.slot < self._records:
            return None
        record = slot_table.unpack_record(self._table, placement.slot)
        end = record.payload_offset + payload_bytes
        if record.payload_bytes != payload_bytes or end > self.capacity_bytes:
            return None
        return self.address + record.payload_offset if self.is_still(placement, state=state) else None

    def is_still(self, placement: Placement, *, state: int) -> bool:
        """Whether the slot has the placement's generation and `state` now."""
        return slot_table.read_state(self._table, placement.slot) == (placement.generation, state)


def _map(descriptor: int, size: int, protection: int, what: str) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection)
    except (OSError, ValueError) as error:
        raise ArenaError(f"cannot map the arena's {what} of {size} bytes: {error}") from error
