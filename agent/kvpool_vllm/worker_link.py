"""A worker's connection to the agent: greets, registers, keeps the arena mapped, relays reservations.

Invariants: when a session is announced no copy into slots of a former one is in flight (`store_lock` is held while copying
and while announcing; `epoch` counts lost connections and is looked at under the lock); a copy keeps the view that it uses.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence

from kvpool_core import wire
from kvpool_vllm.agent_client import AgentClient
from kvpool_vllm.arena_view import ArenaView
from kvpool_vllm.copiers import Copier

logger = logging.getLogger("vllm.kvpool")


class WorkerLink:
    """Implements `agent_client.Peer` for a worker process."""

    def __init__(
        self, socket_path: str, make_hello: Callable[[], wire.Hello], registration: wire.RegisterWorker, copier: Copier
    ) -> None:
        self._make_hello = make_hello
        self._registration = registration
        self._copier = copier
        self.arena: ArenaView | None = None
        self.store_lock = threading.Lock()
        self.epoch = 0
        self.client = AgentClient(socket_path, self, name=f"worker-{make_hello().rank}")

    @property
    def connected(self) -> bool:
        """Whether the agent's word is current."""
        return self.client.connected

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
        """The worker's greeting."""
        return self._make_hello()

    def on_welcome(self, welcome: wire.Welcome, descriptors: Sequence[int]) -> list[wire.Message]:
        """Map what is new; waiting for a copy in flight ends the former session's copies before Announce says so."""
        payload_fd, table_fd = descriptors
        try:
            with self.store_lock:
                if self.arena is not None and self.arena.arena_id == welcome.arena_id:
                    self.arena.replace_table(welcome, table_fd)
                else:
                    self.arena = ArenaView(welcome, payload_fd, table_fd)
                    self._register_in_background(self.arena)
        finally:
            os.close(payload_fd)
            os.close(table_fd)
        return [wire.Announce(self.client.next_id(), [], [], []), self._registration]

    def on_message(self, message: wire.AgentMessage) -> None:
        """Workers act on no pushed message but a call to announce themselves again."""
        if isinstance(message, wire.Reannounce):
            self.client.send(wire.Announce(self.client.next_id(), [], [], []))

    def on_idle(self) -> None:
        """Workers have nothing to say by themselves."""

    def on_disconnected(self) -> None:
        """Copies into the lost agent's slots stop at the next block."""
        self.epoch += 1

    def _register_in_background(self, arena: ArenaView) -> None:
        arguments = (weakref.ref(arena), arena.address, arena.capacity_bytes)
        threading.Thread(target=self._register, args=arguments, name="kvpool-register", daemon=True).start()

    def _register(self, arena: weakref.ref[ArenaView], address: int, size: int) -> None:
        keep = arena()
        if keep is not None:
            registered = self._copier.register(address, size)
            weakref.finalize(keep, self._copier.unregister, registered)
