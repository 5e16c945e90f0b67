"""Leases: an engine's short right to read slots on behalf of a request.

Invariant: a slot's `holds` counts exactly the leases (and pins) on it, and the table's lease_until_ns is 0 or the latest
end that was granted while any lease is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool_agent.slot import Slot
from kvpool_agent.slot_writer import SlotWriter

LeaseKey = tuple[str, str]
"""(engine id, request)"""


@dataclass(slots=True)
class Lease:
    """Slots held for one request until a time (CLOCK_MONOTONIC ns)."""

    slots: list[Slot]
    until_ns: int


class LeaseBook:
    """All leases. `unhold` is called for each hold that ends."""

    def __init__(self, writer: SlotWriter, unhold: Callable[[Slot], None]) -> None:
        self._writer = writer
        self._unhold = unhold
        self._leases: dict[LeaseKey, Lease] = {}
        self._ends: list[tuple[int, LeaseKey]] = []
        self._by_engine: dict[str, dict[int, int]] = {}
        self._bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def leased_bytes(self, engine: str) -> int:
        """Arena bytes that the engine's leases cover, each slot once."""
        return self._bytes.get(engine, 0)

    def is_leased_by(self, engine: str, slot: Slot) -> bool:
        """Whether one of the engine's leases covers the slot."""
        return slot.index in self._by_engine.get(engine, ())

    def requests_of(self, engine: str) -> list[str]:
        """Requests of the engine that hold a lease."""
        return [request for owner, request in self._leases if owner == engine]

    def replace(self, engine: str, request: str, slots: Sequence[Slot], until_ns: int) -> None:
        """The request leases exactly these slots now; the new lease begins before the former one ends."""
        key = (engine, request)
        former = self._leases.pop(key, None)
        if slots:
            self._leases[key] = Lease([], until_ns)
            heapq.heappush(self._ends, (until_ns, key))
            self._cover(key, slots, until_ns)
        if former is not None:
            self._end(engine, former)

    def extend(self, engine: str, request: str, slot: Slot, until_ns: int) -> None:
        """Add one slot to the request's lease, which lasts until then at least."""
        key = (engine, request)
        lease = self._leases.get(key)
        if lease is None:
            self.replace(engine, request, [slot], until_ns)
            return
        lease.until_ns = max(lease.until_ns, until_ns)
        heapq.heappush(self._ends, (lease.until_ns, key))
        self._cover(key, [slot], lease.until_ns)

    def release(self, engine: str, request: str) -> None:
        """The request reads nothing any more."""
        lease = self._leases.pop((engine, request), None)
        if lease is not None:
            self._end(engine, lease)

    def expire(self, now_ns: int) -> int:
        """End leases whose time has passed; returns how many."""
        ended = 0
        while self._ends and self._ends[0][0] <= now_ns:
            _until, key = heapq.heappop(self._ends)
            lease = self._leases.get(key)
            if lease is not None and lease.until_ns <= now_ns:
                self.release(*key)
                ended += 1
        return ended

    def _cover(self, key: LeaseKey, slots: Sequence[Slot], until_ns: int) -> None:
        """The hot path of a lookup: thousands of slots at a time."""
        engine = key[0]
        counts = self._by_engine.setdefault(engine, {})
        write_lease = self._writer.lease
        added_bytes = 0
        for slot in slots:
            index = slot.index
            count = counts.get(index, 0)
            counts[index] = count + 1
            if not count:
                added_bytes += slot.chunk.class_bytes
            slot.holds += 1
            if until_ns > slot.lease_until_ns:
                slot.lease_until_ns = until_ns
                write_lease(index, until_ns)
        self._leases[key].slots.extend(slots)
        self._bytes[engine] = self._bytes.get(engine, 0) + added_bytes

    def _end(self, engine: str, lease: Lease) -> None:
        counts = self._by_engine[engine]
        for slot in lease.slots:
            counts[slot.index] -= 1
            if not counts[slot.index]:
                del counts[slot.index]
                self._bytes[engine] -= slot.chunk.class_bytes
            self._unhold(slot)
        if not counts:
            del self._by_engine[engine]
            del self._bytes[engine]
