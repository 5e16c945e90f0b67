"""What the holder keeps: one payload memfd, filled with pages step by step, and the latest slot table.

Invariant: `descriptors()` is empty until every page of the payload is there.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass

from kvpool_agent.memfd import check_sealed, create_payload, seal_payload
from kvpool_core.errors import ArenaError
from kvpool_core.wire import HolderKeep

PREFAULT_STEP_BYTES = 64 << 20
"""64 MiB take some 20 ms: short enough to answer messages in between, long enough not to count."""
ARENA_ID_BYTES = 16
CAPACITY_LIMIT_BYTES = 1 << 50
"""Larger wishes are mistakes and would overflow file offsets sooner or later."""


@dataclass(slots=True)
class KeptArena:
    """The arena in the holder's hands."""

    arena_id: bytes
    capacity_bytes: int
    huge_page_bytes: int
    payload_fd: int
    table_fd: int | None
    prefaulted_bytes: int

    @property
    def complete(self) -> bool:
        """Whether every page is there."""
        return self.prefaulted_bytes >= self.capacity_bytes

    def descriptors(self) -> tuple[int, ...]:
        """What to pass to an agent: nothing, the payload, or payload and table."""
        if not self.complete:
            return ()
        return (self.payload_fd,) if self.table_fd is None else (self.payload_fd, self.table_fd)

    def prefault_step(self) -> None:
        """Allocate the next pages; ArenaError when the node has none left."""
        step = min(max(PREFAULT_STEP_BYTES, self.huge_page_bytes), self.capacity_bytes - self.prefaulted_bytes)
        try:
            os.posix_fallocate(self.payload_fd, self.prefaulted_bytes, step)
        except OSError as error:
            done = f"{self.prefaulted_bytes} of {self.capacity_bytes} bytes"
            hint = (
                "reserve huge pages" if self.huge_page_bytes and error.errno == errno.ENOSPC else "lower ram.capacity"
            )
            raise ArenaError(f"no memory for the arena after {done}: {error.strerror}: {hint}") from error
        self.prefaulted_bytes += step
        if self.complete:
            seal_payload(self.payload_fd)

    def replace_table(self, table_fd: int) -> None:
        """Keep a newer table; ArenaError (and the old one kept) when it is not a sealed memfd."""
        check_sealed(table_fd)
        if self.table_fd is not None:
            os.close(self.table_fd)
        self.table_fd = table_fd

    def close(self) -> None:
        """Let both go: the kernel frees the pages once no engine maps them either."""
        os.close(self.payload_fd)
        if self.table_fd is not None:
            os.close(self.table_fd)


def create_arena(capacity_bytes: int, huge_page_bytes: int) -> KeptArena:
    """A new arena without pages; ArenaError when its size makes no sense or the kernel refuses."""
    if not 0 < capacity_bytes <= CAPACITY_LIMIT_BYTES:
        raise ArenaError(f"an arena of {capacity_bytes} bytes makes no sense")
    if huge_page_bytes not in (0, 2 << 20, 1 << 30) or (huge_page_bytes and capacity_bytes % huge_page_bytes):
        raise ArenaError(f"huge pages of {huge_page_bytes} bytes do not fit a capacity of {capacity_bytes} bytes")
    return KeptArena(
        arena_id=secrets.token_bytes(ARENA_ID_BYTES),
        capacity_bytes=capacity_bytes,
        huge_page_bytes=huge_page_bytes,
        payload_fd=create_payload(capacity_bytes, huge_page_bytes),
        table_fd=None,
        prefaulted_bytes=0,
    )


def adopt_arena(message: HolderKeep, fds: list[int]) -> KeptArena:
    """An arena from a living agent, [payload, table]; ArenaError when the descriptors are not what the message says."""
    if len(message.arena_id) != ARENA_ID_BYTES or len(fds) != 2:
        raise ArenaError("nothing is kept here: HolderKeep must bring payload and table")
    check_sealed(fds[0], size_bytes=message.capacity_bytes)
    check_sealed(fds[1])
    return KeptArena(
        arena_id=message.arena_id,
        capacity_bytes=message.capacity_bytes,
        huge_page_bytes=message.huge_page_bytes,
        payload_fd=fds[0],
        table_fd=fds[1],
        prefaulted_bytes=message.capacity_bytes,
    )
