"""A worker's connection to the agent: greets, registers, keeps the arena mapped, relays reservations.

Invariants: every copy happens under `store_lock` or `load_lock`, with the `arena` that is current then; the arena is
unmapped only after it was taken away under both, so no copy in flight can meet unmapped memory. When a session is announced
no copy into slots of a former one is in flight (`epoch` counts lost connections and is looked at under `store_lock`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvpool_core import wire
from kvpool_vllm.agent_client import AgentClient
from kvpool_vllm.arena_view import ArenaView
from kvpool_vllm.registration import Registration

if TYPE_CHECKING:
    from kvpool_vllm.copiers import Copier

logger = logging.getLogger("vllm.kvpool")

ABANDON_SECONDS = 60.0
"""Without an agent for this long the arena is unmapped, so that a deleted pool's memory returns to the node. An agent that
restarts is back within seconds; one that comes later finds its blocks at the holder all the same."""


class WorkerLink:
    """Implements `agent_client.Peer` for a worker process."""

    def __init__(
        self,
        socket_path: str,
        make_hello: Callable[[], wire.Hello],
        registration: wire.RegisterWorker,
        copier: Copier,
        *,
        rank: int,
    ) -> None:
        self._make_hello = make_hello
        self._registration = registration
        self._copier = copier
        self._pinned: Registration | None = None
        self.arena: ArenaView | None = None
        self.store_lock = threading.Lock()
        self.load_lock = threading.Lock()
        self.epoch = 0
        self._is_known = False
        self.client = AgentClient(socket_path, self, name=f"worker-{rank}")

    @property
    def connected(self) -> bool:
        """Whether the agent's word is current."""
        return self.client.connected

    @property
    def can_reserve(self) -> bool:
        """Whether the agent has known the engine's domain on this connection: a new one does not at first, and closes on whoever
        reserves before."""
        return self.connected and self._is_known

    def reserve(
        self, job: int, domain: bytes, private: bool, keys: list[wire.StoreKey], seconds: float
    ) -> wire.Reserved | None:
        """Ask for slots; None when the agent does not answer in time."""
        message = wire.Reserve(self.client.next_id(), job, domain, private, keys)
        answer = self.client.request(message, timeout_seconds=seconds)
        return answer if isinstance(answer, wire.Reserved) else None

    def ack(self, job: int) -> bool:
        """Tell that this rank's part of the job is copied."""
        return self.client.send(wire.Ack(self.client.next_id(), job))

    def abort(self, job: int) -> None:
        """Tell that this rank copies nothing (more) of the job."""
        self.client.send(wire.Abort(self.client.next_id(), job))

    def close(self) -> None:
        """End the connection; mappings stay until the process ends."""
        self.client.close()

    # --- agent_client.Peer ----------------------------------------------------------------------------------------

    def hello(self) -> wire.Hello:
        """The worker's greeting, with the arena that is mapped by now."""
        arena = self.arena
        return msgspec.structs.replace(self._make_hello(), arena_id=arena.arena_id if arena is not None else b"")

    def on_welcome(self, welcome: wire.Welcome, descriptors: Sequence[int]) -> list[wire.Message]:
        """Map what is new; waiting for a copy in flight ends the former session's copies before Announce says so."""
        payload_fd, table_fd = descriptors
        try:
            if self.arena is not None and self.arena.arena_id == welcome.arena_id:
                with self.store_lock:
                    self.arena.replace_table(welcome, table_fd)
            else:
                self._unmap()
                arena = ArenaView(welcome, payload_fd, table_fd)
                self._pinned = Registration(self._copier, arena.address, arena.capacity_bytes)
                with self.store_lock:
                    self.arena = arena
        finally:
            os.close(payload_fd)
            os.close(table_fd)
        return [wire.Announce(self.client.next_id(), [], [], []), self._registration]

    def on_connected(self) -> None:
        """Everything was said with the greeting: a worker knows its part before it connects."""

    def on_standby(self, standby: wire.Standby) -> list[wire.Message]:
        """There will be another arena than the one mapped here: make room for it."""
        if not standby.unmap:
            return []
        self._unmap()
        return [wire.Unmapped(0)]

    def on_refused(self, refused: wire.Refused) -> None:
        """An engine that may not use the pool holds none of its memory."""
        if refused.code not in wire.TEMPORARY_REFUSALS:
            self._unmap()

    def on_absent(self, seconds: float) -> None:
        """The mapping is kept for an agent that restarts, not for one that does not come back."""
        if seconds >= ABANDON_SECONDS:
            self._unmap()

    def on_message(self, message: wire.AgentMessage) -> None:
        """The domain, of which a worker needs to know that there is one, and the call to announce itself again."""
        if isinstance(message, wire.Domain):
            self._is_known = self._is_known or message.state == "known"
        elif isinstance(message, wire.Reannounce):
            self.client.send(wire.Announce(self.client.next_id(), [], [], []))

    def on_idle(self) -> None:
        """Workers have nothing to say by themselves."""

    def on_disconnected(self) -> None:
        """Copies into the lost agent's slots stop at the next block."""
        self.epoch += 1
        self._is_known = False

    def _unmap(self) -> None:
        """Take the arena away from the copies, wait for those in flight, then undo registration and mapping."""
        with self.store_lock, self.load_lock:
            arena, self.arena = self.arena, None
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.undo()
        if arena is not None:
            arena.close()
            logger.info("kvpool: unmapped the arena %s", arena.arena_id.hex())
