"""Slots and the blocks in them: indexing, room making, freeing, and the slot table that says so.

Pure but for the slot table it writes. Invariants: a slot's generation changes before its payload may; a block with
resident children, a lease or a pin is never evicted.
"""

from __future__ import annotations

from typing import Protocol, cast

from kvpool_agent.allocator import Chunk, SlabAllocator, class_size
from kvpool_agent.eviction import LruQueue
from kvpool_agent.slot import NO_PARENT, BlockIndex, Slot
from kvpool_agent.slot_writer import SlotWriter
from kvpool_core.slot_table import FREE, QUARANTINED, READY, WRITING, SlotRecord
from kvpool_core.wire import StoreKey

EVICTIONS_PER_BLOCK = 4096
"""Most blocks to evict for one that needs room: emptying a slab of another class takes many, a stall must not come of it."""

STATE_NAMES = {WRITING: "writing", READY: "ready", QUARANTINED: "quarantined"}


class Observer(Protocol):
    """Is told what becomes readable and what ceases to be."""

    def block_stored(self, slot: Slot) -> None:
        """A block is READY."""
        ...

    def block_removed(self, slot: Slot, *, evicted: bool) -> None:
        """A READY block is gone."""
        ...

    def job_ended(self, *, stored: bool) -> None:
        """A store job ended: its blocks are READY, or never will be."""
        ...


class SlotPool:
    """All slots of an arena."""

    def __init__(
        self, writer: SlotWriter, allocator: SlabAllocator, observer: Observer, *, generation_base: int
    ) -> None:
        self.writer = writer
        self.allocator = allocator
        self.observer = observer
        self._generation_base = generation_base
        self._homes: dict[tuple[bytes, int], BlockIndex] = {}
        self._queues: dict[int, LruQueue] = {}
        self._slots: dict[int, Slot] = {}
        self._counts = dict.fromkeys(STATE_NAMES, 0)
        self.recency = 0

    # --- looking at it --------------------------------------------------------------------------------------------

    def find(self, domain: bytes, group: int) -> BlockIndex | None:
        """The index of a domain's group, None when it holds no block."""
        return self._homes.get((domain, group))

    def homes(self) -> list[BlockIndex]:
        """All indexes."""
        return list(self._homes.values())

    def slots(self) -> list[Slot]:
        """All slots that are not FREE."""
        return list(self._slots.values())

    def at(self, index: int) -> Slot | None:
        """The slot of that number when it is in use."""
        return self._slots.get(index)

    def counts(self) -> dict[str, int]:
        """Slots in use by state; FREE ones have no fixed number, as it depends on the sizes to come."""
        return {name: self._counts[state] for state, name in STATE_NAMES.items()}

    def next_recency(self, blocks: int) -> int:
        """The recency of the first of so many blocks of a prefix; each further one gets one less than its parent."""
        self.recency += blocks
        return self.recency

    def set_recency(self, slot: Slot, recency: int) -> None:
        """The block was asked for."""
        slot.recency = recency
        self.writer.recency(slot.index, recency)

    # --- life of a slot ---------------------------------------------------------------------------------------------

    def begin(
        self, domain: bytes, key: StoreKey, payload_bytes: int, *, flags: int, owner: int, lease_until_ns: int
    ) -> Slot | None:
        """A WRITING slot for an absent block, making room for it; None when there is none to be made."""
        chunk = self._make_room(payload_bytes)
        if chunk is None:
            return None
        record = SlotRecord(
            generation=max(self.writer.read_generation(chunk.slot), self._generation_base) + 1,
            lease_until_ns=lease_until_ns,
            payload_offset=chunk.offset,
            recency=self.recency,
            checksum=0,
            owner=owner,
            payload_bytes=payload_bytes,
            group=key.group,
            position=key.position,
            state=WRITING,
            flags=flags,
            domain=domain,
            block_hash=key.block_hash,
            parent_hash=key.parent or NO_PARENT,
        )
        return self.register(chunk, record, indexed=True)

    def register(self, chunk: Chunk, record: SlotRecord, *, indexed: bool) -> Slot:
        """Enter a slot with its record into table and pool."""
        home = self._homes.get((record.domain, record.group))
        if home is None:
            home = BlockIndex(record.domain, record.group)
            if indexed:
                self._homes[record.domain, record.group] = home
        self.writer.record(chunk.slot, record)
        slot = self._slots[chunk.slot] = Slot(home, chunk, record)
        self._counts[slot.state] += 1
        if indexed:
            home.add(slot)
        if slot.state == READY:
            self.observer.block_stored(slot)
        return slot

    def make_ready(self, slot: Slot) -> None:
        """Every byte of the payload is there."""
        self.writer.lease(slot.index, 0)
        self._set_state(slot, READY)
        self.observer.block_stored(slot)
        self.offer(slot)

    def hide(self, slot: Slot, *, evicted: bool = False) -> None:
        """Lookups find the block no more; the slot itself stays until `free`."""
        was_ready = slot.state == READY
        if was_ready:
            self.writer.generation(slot.index, slot.generation + 1)
            slot.generation += 1
        home = slot.home
        leaf = home.remove(slot)
        self._set_state(slot, QUARANTINED)
        if was_ready:
            self.observer.block_removed(slot, evicted=evicted)
        if leaf is not None:
            self.offer(leaf)
        if not home.slots and self._homes.get((home.domain, home.group)) is home:
            del self._homes[home.domain, home.group]

    def free(self, slot: Slot) -> None:
        """Nobody reads or writes the hidden slot any more."""
        slot.generation += 1
        self.writer.generation(slot.index, slot.generation)
        self._counts[slot.state] -= 1
        slot.state = FREE
        self.writer.state(slot.index, FREE)
        self.writer.lease(slot.index, 0)
        del self._slots[slot.index]
        self.allocator.free(slot.chunk)

    def offer(self, slot: Slot) -> None:
        """Queue the slot for eviction if it may go."""
        if slot.is_evictable():
            self._queue(slot.chunk.class_bytes).offer(slot)

    # --- room -------------------------------------------------------------------------------------------------------

    def _make_room(self, payload_bytes: int) -> Chunk | None:
        """A chunk, evicting the least recent blocks of all classes until one of ours or a whole slab is free."""
        if not self.allocator.fits(payload_bytes):
            return None
        for _ in range(EVICTIONS_PER_BLOCK):
            chunk = self.allocator.allocate(payload_bytes)
            if chunk is not None:
                return chunk
            victim = self._coldest(class_size(payload_bytes))
            if victim is None:
                return None
            self.hide(victim, evicted=True)
            self.free(victim)
        return None

    def _coldest(self, class_bytes: int) -> Slot | None:
        """The least recent evictable block; among equals one of the class that needs room."""
        best: Slot | None = None
        for queue_class, queue in self._queues.items():
            slot = cast("Slot | None", queue.victim())
            if slot is None:
                continue
            if best is None or (slot.recency, queue_class != class_bytes) < (
                best.recency,
                best.chunk.class_bytes != class_bytes,
            ):
                best = slot
        return best

    def _queue(self, class_bytes: int) -> LruQueue:
        queue = self._queues.get(class_bytes)
        if queue is None:
            queue = self._queues[class_bytes] = LruQueue()
        return queue

    def _set_state(self, slot: Slot, state: int) -> None:
        self._counts[slot.state] -= 1
        self._counts[state] += 1
        slot.state = state
        self.writer.state(slot.index, state)
