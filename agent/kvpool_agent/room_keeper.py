"""Follows what becomes of the arena in the holder, and holds a new one back until there is room for it.

Invariant: what probes, operator and waiting engines are told is what is waited for.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from kvpool_agent.arena_room import LastArena, Situation, needed_bytes, read_available_bytes, why_pending
from kvpool_agent.arena_status import ArenaStatus, Mapper
from kvpool_agent.holder_link import Wish
from kvpool_agent.server import Server

ROOM_RETRY_SECONDS = 0.1

log = logging.getLogger("kvpool.agent.room")


@dataclass(slots=True)
class RoomKeeper:
    """Implements `holder_link.Progress`. connect_by: until then (loop's clock) engines may still come to the socket."""

    wish: Wish
    server: Server
    status: ArenaStatus
    last: LastArena
    connect_by: float

    async def make_room(self, kept_bytes: int) -> None:
        """Return when a new arena may be made; kept_bytes: pages of another arena that the holder frees for it."""
        needed = needed_bytes(self.wish.capacity_bytes, self.wish.huge_page_bytes, kept_bytes=kept_bytes)
        has_former = bool(self.last.read())
        self.server.stand_by(kept_arena=b"", reason="there will be a new arena")
        told = ""
        while True:
            mappers = self._mappers()
            left = self.connect_by - asyncio.get_running_loop().time() if has_former else 0.0
            available = read_available_bytes(self.wish.huge_page_bytes)
            reason = why_pending(Situation(mappers, left, needed, available))
            if not reason:
                return
            self.status.pend(reason, mappers)
            self.server.stand_by(kept_arena=b"", reason=reason)
            kind = reason.partition(":")[0]
            if kind != told:
                log.warning("ArenaPending", extra={"data": {"waiting_for": reason}})
                told = kind
            await asyncio.sleep(ROOM_RETRY_SECONDS)

    def progressed(self, arena_id: bytes, prefaulted_bytes: int) -> None:
        """The holder has this arena, with so much of its memory."""
        self.status.prefault(prefaulted_bytes)
        self.server.stand_by(kept_arena=arena_id, reason=self.status.waiting_for)

    def failed(self, reason: str) -> None:
        """The holder is away or refused; it is asked again."""
        self.status.wait(f"the holder: {reason}")

    def _mappers(self) -> list[Mapper]:
        return [
            Mapper(guest.hello.engine_id, guest.hello.role, guest.hello.rank, guest.pod)
            for guest in self.server.mapping_guests()
            if guest.hello is not None
        ]
