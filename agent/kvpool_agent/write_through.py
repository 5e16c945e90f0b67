"""Hands committed blocks to the Valkey tier.

Invariant: the tier's threads see a payload only while it is pinned; private blocks never get here; a payload that changed
while it waited is not written, and its block is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from kvpool_agent.arena import Arena
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.slot import Slot
from kvpool_agent.slot_store import SlotStore
from kvpool_agent.valkey_tier import BlockKey, ValkeyTier, WriteItem

PIN_TIMEOUT_SECONDS = 5.0
"""Longest wait of a tier's thread for the loop; a loop that is busy longer than that has other sorrows."""


class WriteThrough:
    """Offers each block once; the tier may drop it."""

    def __init__(
        self,
        tier: ValkeyTier,
        store: SlotStore,
        arena: Arena,
        metrics: AgentMetrics,
        loop: asyncio.AbstractEventLoop,
        *,
        drop_damaged: Callable[[Slot, str], None],
    ) -> None:
        self._tier = tier
        self._store = store
        self._arena = arena
        self._metrics = metrics
        self._loop = loop
        self._drop_damaged = drop_damaged

    def offer(self, slot: Slot) -> None:
        """Queue a checksummed block unless it is private."""
        if slot.private:
            return
        item = WriteItem(
            key=BlockKey(slot.home.domain, slot.home.group, slot.block_hash),
            read=lambda: self._read(slot),
            done=lambda is_written: self._done(slot, is_written),
            payload_bytes=slot.payload_bytes,
            checksum=slot.checksum,
            damaged=lambda: self._damaged(slot),
        )
        queued = self._tier.write(item)
        self._metrics.valkey_writes.labels("queued" if queued else "dropped").inc()

    def _read(self, slot: Slot) -> memoryview | None:
        """On a thread of the tier: have the loop pin the slot, so that pinning and evicting never race."""
        pinned: Future[bool] = Future()
        try:
            self._loop.call_soon_threadsafe(self._pin, slot, pinned)
            if not pinned.result(PIN_TIMEOUT_SECONDS):
                return None
        except (RuntimeError, TimeoutError):  # the loop is closed, or hangs
            if not pinned.cancel() and pinned.result():
                self._done(slot, False)
            return None
        return self._arena.block(slot.chunk.offset, slot.payload_bytes).toreadonly()

    def _pin(self, slot: Slot, pinned: Future[bool]) -> None:
        if pinned.set_running_or_notify_cancel():
            pinned.set_result(self._store.pin(slot))

    def _damaged(self, slot: Slot) -> None:
        with suppress(RuntimeError):  # the loop is closed: so is the store
            self._loop.call_soon_threadsafe(self._drop_damaged, slot, "write_through")

    def _done(self, slot: Slot, is_written: bool) -> None:
        self._metrics.valkey_writes.labels("written" if is_written else "failed").inc()
        with suppress(RuntimeError):  # the loop is closed: so is the store
            self._loop.call_soon_threadsafe(self._store.unpin, slot)
