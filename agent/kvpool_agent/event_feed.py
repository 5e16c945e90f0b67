"""Turns what happens in the agent into events of the stream, and knows what a snapshot holds.

Invariant: for each scope, snapshot and later changes come from the same state, so a subscriber never misses a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvpool_agent.events import EventHub, Scope, Subscriber
from kvpool_agent.gpu_blocks import GpuBlocks, GpuChanges
from kvpool_agent.hints import ValkeyHints
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.slot import Slot
from kvpool_agent.slot_pool import SlotPool
from kvpool_agent.valkey_tier import BlockKey
from kvpool_core.block_hash import short_hash
from kvpool_core.slot_table import READY
from kvpool_core.wire import EngineInfo, GpuEvents, GpuSnapshot

EVERY_DOMAIN = b""
"""In a cleared scope: all domains of the tier."""


class EventFeed:
    """Observer of slots, hints, engines and their GPU blocks."""

    def __init__(self, hub: EventHub, hints: ValkeyHints, metrics: AgentMetrics) -> None:
        self._hub = hub
        self._hints = hints
        self._metrics = metrics
        self._gpu: dict[str, GpuBlocks] = {}

    # --- arena ------------------------------------------------------------------------------------------------------

    def block_stored(self, slot: Slot) -> None:
        """A block is READY in the arena."""
        self._metrics.stored_blocks.inc()
        self._hub.change(_ram(slot.home.domain, slot.home.group), short_hash(slot.block_hash), stored=True)

    def block_removed(self, slot: Slot, *, evicted: bool) -> None:
        """A READY block left the arena."""
        if evicted:
            self._metrics.evictions.inc()
        self._hub.change(_ram(slot.home.domain, slot.home.group), short_hash(slot.block_hash), stored=False)

    def job_ended(self, *, stored: bool) -> None:
        """A store job ended."""
        self._metrics.stores.labels("stored" if stored else "failed").inc()

    # --- Valkey -----------------------------------------------------------------------------------------------------

    def hint(self, kind: str, key: BlockKey | None) -> None:
        """What the tier saw: "stored", "removed" (with a key) or "cleared".

        Readers go on with what a former process of this agent told them of Valkey, which we do not know: what is gone is
        told of whether or not it is among our own hints. A hint that we forget for want of room is not gone: nothing is told.
        """
        if key is None:
            self._hints.clear()
            self._hub.clear([_valkey(EVERY_DOMAIN, 0)])
        elif kind == "stored":
            self._hints.add(key.domain, key.group, key.block_hash)
            self._hub.change(_valkey(key.domain, key.group), short_hash(key.block_hash), stored=True)
        else:
            self._hints.remove(key.domain, key.group, key.block_hash)
            self._hub.change(_valkey(key.domain, key.group), short_hash(key.block_hash), stored=False)

    # --- engines ----------------------------------------------------------------------------------------------------

    def engine_changed(self, info: EngineInfo) -> None:
        """An engine came, changed or went."""
        self._hub.engine(info)

    def engine_lost(self, engine_id: str) -> None:
        """The engine's scheduler is not connected any more: nothing is known of its GPU."""
        blocks = self._gpu.pop(engine_id, None)
        if blocks is not None:
            self._clear_gpu(engine_id, {group for group, _hash in blocks.present()})

    def gpu_events(self, engine_id: str, message: GpuEvents) -> None:
        """Changes of an engine's own cache."""
        blocks = self._gpu.setdefault(engine_id, GpuBlocks())
        groups = {group for group, _hash in blocks.present()} if "c" in message.kinds else set()
        for changes in blocks.apply(message.kinds, message.groups, message.hashes):
            if changes.cleared:
                self._clear_gpu(engine_id, groups | set(message.groups))
            self._report(engine_id, changes)

    def gpu_snapshot(self, engine_id: str, message: GpuSnapshot) -> None:
        """Everything in an engine's own cache."""
        blocks = self._gpu.setdefault(engine_id, GpuBlocks())
        self._report(engine_id, blocks.replace(message.groups, message.hashes, message.counts))

    def _report(self, engine_id: str, changes: GpuChanges) -> None:
        for (group, value), is_present in changes.blocks.items():
            self._hub.change(_gpu(engine_id, group), value, stored=is_present)

    def _clear_gpu(self, engine_id: str, groups: Iterable[int]) -> None:
        self._hub.clear([_gpu(engine_id, group) for group in sorted(groups)])

    # --- snapshot ---------------------------------------------------------------------------------------------------

    def subscribe(self, engines: Iterable[EngineInfo], pool: SlotPool) -> Subscriber | None:
        """A new reader of the stream; None when there are too many."""
        return self._hub.subscribe(engines, self._present(pool))

    def _present(self, pool: SlotPool) -> Iterator[tuple[Scope, list[int]]]:
        for home in pool.homes():
            ready = [short_hash(slot.block_hash) for slot in home.slots.values() if slot.state == READY]
            yield _ram(home.domain, home.group), ready
        for engine_id, blocks in self._gpu.items():
            by_group: dict[int, list[int]] = {}
            for group, value in blocks.present():
                by_group.setdefault(group, []).append(value)
            for group, values in by_group.items():
                yield _gpu(engine_id, group), values
        for (domain, group), hashes in self._hints.by_place():
            yield _valkey(domain, group), [short_hash(block_hash) for block_hash in hashes]


def _ram(domain: bytes, group: int) -> Scope:
    return "ram", "", domain, group


def _valkey(domain: bytes, group: int) -> Scope:
    return "valkey", "", domain, group


def _gpu(engine_id: str, group: int) -> Scope:
    return "gpu", engine_id, b"", group
