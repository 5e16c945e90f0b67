"""Fetches from Valkey into the arena, each block at most once at a time.

Invariant: a slot is WRITING from the begin of its fetch until the tier has reported on it, and only then ready or free.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool_agent.arena import Arena
from kvpool_agent.load_estimate import FetchEstimate
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.slot import Slot
from kvpool_agent.slot_store import SlotStore
from kvpool_agent.valkey_tier import BlockKey, FetchItem, FetchOutcome, ValkeyTier

Listener = Callable[[Slot, bool], None]
"""Called with a slot and whether it is READY now."""


@dataclass(slots=True)
class _Batch:
    """Blocks asked of the tier together."""

    slots: list[Slot]
    cancelled: threading.Event = field(default_factory=threading.Event)
    first_seconds: float | None = None
    arrived_bytes: int = 0


@dataclass(slots=True)
class _Fetch:
    batch: _Batch
    listeners: list[Listener]


class Fetches:
    """Everything on its way from Valkey."""

    def __init__(self, tier: ValkeyTier, store: SlotStore, arena: Arena, metrics: AgentMetrics) -> None:
        self.tier = tier
        self.estimate = FetchEstimate(at_seconds=time.monotonic())
        self._store = store
        self._arena = arena
        self._metrics = metrics
        self._fetches: dict[int, _Fetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._fetches)

    def begin(self, slots: Sequence[Slot], listener: Listener) -> None:
        """Fetch blocks into slots from `begin_fetch`; the listener hears of each."""
        batch = _Batch(list(slots))
        for slot in batch.slots:
            self._fetches[slot.index] = _Fetch(batch, [listener])
        task = asyncio.get_running_loop().create_task(self._run(batch), name="fetch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def join(self, slot: Slot, listener: Listener) -> None:
        """Hear of a slot that somebody else is having fetched."""
        self._fetches[slot.index].listeners.append(listener)

    def leave(self, slots: Sequence[Slot], listener: Listener) -> None:
        """Hear no more; a batch that nobody waits for is cancelled (what has arrived stays)."""
        batches: list[_Batch] = []
        for slot in slots:
            fetch = self._fetches.get(slot.index)
            if fetch is not None and listener in fetch.listeners:
                fetch.listeners.remove(listener)
                if fetch.batch not in batches:
                    batches.append(fetch.batch)
        for batch in batches:
            waiting = (self._fetches.get(slot.index) for slot in batch.slots)
            if not any(fetch is not None and fetch.batch is batch and fetch.listeners for fetch in waiting):
                batch.cancelled.set()

    async def stop(self) -> None:
        """Cancel everything and wait until no slot is written any more."""
        for fetch in self._fetches.values():
            fetch.batch.cancelled.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, batch: _Batch) -> None:
        started = time.monotonic()

        def on_result(index: int, outcome: FetchOutcome, checksum: int) -> None:
            now = time.monotonic()
            slot = batch.slots[index]
            if outcome is FetchOutcome.OK:
                batch.first_seconds = batch.first_seconds or now - started
                batch.arrived_bytes += slot.payload_bytes
            self._end(slot, outcome, checksum)

        items = [self._item(slot) for slot in batch.slots]
        try:
            await self.tier.fetch(items, on_result, batch.cancelled)
        finally:
            for slot in batch.slots:
                self._end(slot, FetchOutcome.FAILED, 0)
        self._measure(batch, time.monotonic() - started)

    def _item(self, slot: Slot) -> FetchItem:
        key = BlockKey(slot.home.domain, slot.home.group, slot.block_hash)
        return FetchItem(key, self._arena.block(slot.chunk.offset, slot.payload_bytes))

    def _end(self, slot: Slot, outcome: FetchOutcome, checksum: int) -> None:
        if not slot.fetching:
            return
        self._metrics.fetched_blocks.labels(outcome.name.lower()).inc()
        fetch = self._fetches.pop(slot.index)
        is_ready = outcome is FetchOutcome.OK
        self._store.end_fetch(slot, checksum if is_ready else None)
        for listener in fetch.listeners:
            listener(slot, is_ready)

    def _measure(self, batch: _Batch, seconds: float) -> None:
        """A batch given up before anything came still says that the latency is at least so long."""
        silent = batch.first_seconds is None
        if silent and not (batch.cancelled.is_set() and seconds > self.estimate.latency_seconds):
            return
        self.estimate = self.estimate.with_sample(
            latency_seconds=batch.first_seconds or seconds,
            size_bytes=batch.arrived_bytes,
            seconds=seconds,
            now_seconds=time.monotonic(),
        )
        self._metrics.fetch_latency_seconds.set(self.estimate.latency_seconds)
        self._metrics.fetch_bytes_per_second.set(self.estimate.bytes_per_second)
