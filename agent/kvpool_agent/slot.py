"""One slot in use, and the index of the blocks of one domain and group.

Invariant: `BlockIndex.children[h]` counts the indexed blocks whose parent is h, so a block is a leaf exactly when it is 0.
"""

from __future__ import annotations

from kvpool_agent.allocator import Chunk
from kvpool_core.slot_table import FREE, PRIVATE, READY, UNVERIFIED, SlotRecord

NO_PARENT = bytes(32)


class BlockIndex:
    """Blocks of one (domain, group) that are READY or being written."""

    __slots__ = ("children", "domain", "group", "slots")

    def __init__(self, domain: bytes, group: int) -> None:
        self.domain = domain
        self.group = group
        self.slots: dict[bytes, Slot] = {}
        self.children: dict[bytes, int] = {}

    def add(self, slot: Slot) -> None:
        """Index a block."""
        self.slots[slot.block_hash] = slot
        self.children[slot.parent] = self.children.get(slot.parent, 0) + 1

    def remove(self, slot: Slot) -> Slot | None:
        """Forget a block; returns its parent's slot when that has become a leaf."""
        if self.slots.get(slot.block_hash) is not slot:
            return None
        del self.slots[slot.block_hash]
        left = self.children[slot.parent] - 1
        if left:
            self.children[slot.parent] = left
            return None
        del self.children[slot.parent]
        return self.slots.get(slot.parent)


class Slot:
    """A slot that is not FREE. `holds`: leases and pins on it; `doomed`: to be freed when the last hold goes."""

    __slots__ = (
        "block_hash",
        "checksum",
        "chunk",
        "doomed",
        "fetching",
        "flags",
        "generation",
        "holds",
        "home",
        "index",
        "lease_until_ns",
        "owner",
        "parent",
        "payload_bytes",
        "position",
        "queued",
        "recency",
        "state",
    )

    def __init__(self, home: BlockIndex, chunk: Chunk, record: SlotRecord) -> None:
        self.home = home
        self.chunk = chunk
        self.index = chunk.slot
        self.generation = record.generation
        self.state = record.state
        self.flags = record.flags
        self.checksum = record.checksum
        self.recency = record.recency
        self.position = record.position
        self.block_hash = record.block_hash
        self.parent = record.parent_hash
        self.payload_bytes = record.payload_bytes
        self.owner = record.owner
        self.lease_until_ns = 0
        self.holds = 0
        self.queued = False
        self.doomed = False
        self.fetching = False

    def is_evictable(self) -> bool:
        """Whether it may go now: READY, a leaf, and nobody holds it."""
        return self.state == READY and not self.holds and self.block_hash not in self.home.children

    @property
    def readable(self) -> bool:
        """Whether a lookup may answer HIT."""
        return self.state == READY and not self.flags & UNVERIFIED

    @property
    def private(self) -> bool:
        """Whether the block never leaves the node."""
        return bool(self.flags & PRIVATE)

    @property
    def gone(self) -> bool:
        """Whether the slot was freed since."""
        return self.state == FREE
