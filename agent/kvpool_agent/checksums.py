"""Checksums of payloads in the arena, computed off the loop.

Invariant: a payload is pinned while a thread reads it, so what was computed belongs to the block it was computed for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from kvpool_agent.arena import Arena
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.slot import Slot
from kvpool_agent.slot_store import SlotStore
from kvpool_core.slot_table import CHECKSUM_VALID, READY, UNVERIFIED

BATCH_BYTES = 16 << 20
"""Payload hashed in one go: some 2 ms, so that a lookup's verification never waits long behind a batch."""
SCRUB_BYTES_PER_SECOND = 8 << 20
"""The slow scrub reads 64 GiB in about two hours and costs a thousandth of a core."""
UNVERIFIED_BYTES_PER_SECOND = 256 << 20
"""After a take-over the arena is verified faster, since each block is verified before its first hit anyway."""
SCRUB_BATCH_BYTES = 4 << 20
SCRUB_LOOKS = 256
"""Slots looked at for one batch of the scrub: bounds its time on the loop."""

log = logging.getLogger("kvpool.agent.checksums")


def hash_payloads(payloads: Sequence[memoryview]) -> list[int]:
    """xxh3-64 of each payload; runs on the hashing thread."""
    return [xxhash.xxh3_64_intdigest(payload) for payload in payloads]


class Checksums:
    """Computes after a commit, verifies after a take-over, scrubs slowly."""

    def __init__(
        self, store: SlotStore, arena: Arena, metrics: AgentMetrics, on_checksummed: Callable[[Slot], None]
    ) -> None:
        self._store = store
        self._arena = arena
        self._metrics = metrics
        self._on_checksummed = on_checksummed
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksum")
        self._committed: deque[Slot] = deque()
        self._hashing = 0
        self._wake = asyncio.Event()
        self._unverified: deque[Slot] = deque()
        self._cursor = -1

    def enqueue(self, slots: Sequence[Slot]) -> None:
        """These blocks were committed."""
        self._committed.extend(slots)
        self._wake.set()

    def take_over(self) -> None:
        """Begin the scrub with the slots that a former agent left."""
        self._unverified.extend(slot for slot in self._store.pool.slots() if slot.flags & UNVERIFIED)

    @property
    def waiting(self) -> int:
        """Committed blocks without a checksum yet."""
        return len(self._committed) + self._hashing

    async def verify(self, slots: Sequence[Slot], *, where: str) -> None:
        """Afterwards each slot is verified or dropped."""
        for batch in _batches(deque(dict.fromkeys(slots))):
            for slot, checksum in await self._hash(batch):
                self._judge(slot, checksum, where)

    async def run_commits(self) -> None:
        """Checksum what is committed, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        """Checksum what is committed by now: without one, a block does not outlive this process."""
        while self._committed:
            batch = next(_batches(self._committed))
            self._hashing += len(batch)
            try:
                hashed = await self._hash(batch)
            except asyncio.CancelledError:
                self._committed.extendleft(reversed(batch))
                raise
            finally:
                self._hashing -= len(batch)
            for slot, checksum in hashed:
                self._store.set_checksum(slot, checksum)
                self._on_checksummed(slot)

    async def run_scrub(self) -> None:
        """Verify everything in turn, slowly, for ever; what was taken over first."""
        while True:
            batch = self._next_to_scrub()
            size = sum(slot.payload_bytes for slot in batch)
            unverified = any(slot.flags & UNVERIFIED for slot in batch)
            await self.verify(batch, where="takeover" if unverified else "scrub")
            rate = UNVERIFIED_BYTES_PER_SECOND if unverified else SCRUB_BYTES_PER_SECOND
            await asyncio.sleep(size / rate if batch else 1.0)

    def close(self) -> None:
        """End the thread after the batch at hand."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _next_to_scrub(self) -> list[Slot]:
        """A batch of the slots taken over, then of all slots in turn; short, also when few slots are in use."""
        batch: list[Slot] = []
        size = 0
        looks = len(self._unverified) or self._store.pool.allocator.slots_numbered
        for _ in range(min(looks, SCRUB_LOOKS)):
            slot = self._unverified.popleft() if self._unverified else self._next_in_turn()
            if slot is not None and slot.state == READY and slot.flags & CHECKSUM_VALID:
                batch.append(slot)
                size += slot.payload_bytes
            if size >= SCRUB_BATCH_BYTES:
                break
        return batch

    def _next_in_turn(self) -> Slot | None:
        pool = self._store.pool
        self._cursor = (self._cursor + 1) % max(1, pool.allocator.slots_numbered)
        return pool.at(self._cursor)

    def _judge(self, slot: Slot, checksum: int, where: str) -> None:
        if slot.state != READY:
            return
        if checksum == slot.checksum:
            self._store.set_checksum(slot, checksum)
        else:
            self.drop_damaged(slot, where)

    def drop_damaged(self, slot: Slot, where: str) -> None:
        """The payload was found to be another than was stored; `where`: by whom."""
        if slot.state != READY:
            return
        self._metrics.checksum_failures.labels(where).inc()
        log.error(
            "a payload is not what was stored; dropped it",
            extra={"data": {"where": where, "slot": slot.index, "block_hash": slot.block_hash.hex()}},
        )
        self._store.drop(slot)

    async def _hash(self, slots: Sequence[Slot]) -> list[tuple[Slot, int]]:
        """(slot, checksum) of those still there; each pinned meanwhile, and returned before its pin ends."""
        pinned = [slot for slot in slots if self._store.pin(slot)]
        try:
            payloads = [self._arena.block(slot.chunk.offset, slot.payload_bytes) for slot in pinned]
            loop = asyncio.get_running_loop()
            checksums = await loop.run_in_executor(self._executor, hash_payloads, payloads)
            self._metrics.checksummed_bytes.inc(sum(slot.payload_bytes for slot in pinned))
            return [(slot, value) for slot, value in zip(pinned, checksums, strict=True) if slot.state == READY]
        finally:
            for slot in pinned:
                self._store.unpin(slot)


def _batches(slots: deque[Slot]) -> Iterator[list[Slot]]:
    """Take portions of about BATCH_BYTES off the queue."""
    while slots:
        batch = [slots.popleft()]
        size = batch[0].payload_bytes
        while slots and size < BATCH_BYTES:
            batch.append(slots.popleft())
            size += batch[-1].payload_bytes
        yield batch
