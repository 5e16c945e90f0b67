"""Which block goes when room is needed: least recently asked for, never a parent before its child.

Pure. Invariant: `victim` returns only slots for which `is_evictable` holds at that moment. Each slot is queued at most
once; a slot that was touched while queued is moved on when its turn comes, so a touch costs nothing.
"""

from __future__ import annotations

import heapq
from typing import Protocol


class Candidate(Protocol):
    """What the policy must know of a slot."""

    index: int
    generation: int
    recency: int
    queued: bool

    def is_evictable(self) -> bool:
        """READY, not leased, not pinned, without resident children."""
        ...


class LruQueue:
    """Candidates of one size class, oldest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Candidate]] = []

    def offer(self, slot: Candidate) -> None:
        """Call when a slot may have become evictable."""
        if not slot.queued and slot.is_evictable():
            slot.queued = True
            heapq.heappush(self._heap, (slot.recency, slot.index, slot.generation, slot))

    def victim(self) -> Candidate | None:
        """The oldest evictable slot, still queued; None when there is none."""
        while self._heap:
            recency, index, generation, slot = self._heap[0]
            if slot.generation != generation:
                heapq.heappop(self._heap)
            elif not slot.is_evictable():
                heapq.heappop(self._heap)
                slot.queued = False
            elif slot.recency != recency:
                heapq.heapreplace(self._heap, (slot.recency, index, generation, slot))
            else:
                return slot
        return None
