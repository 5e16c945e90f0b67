"""The block store of one arena: who may read which block, who is writing it, when either ends.

Pure but for the slot table it writes (time is an argument). Invariants: a block is readable only after every rank of its
engine has acknowledged it; a slot is reused only when nobody can still be writing it and no lease covers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpool_agent.leases import LeaseBook
from kvpool_agent.slot import Slot
from kvpool_agent.slot_pool import SlotPool
from kvpool_agent.takeover import AGENT_OWNER, Takeover
from kvpool_agent.write_jobs import Job, JobBook, Reservation
from kvpool_core.slot_table import CHECKSUM_VALID, PRIVATE, READY, UNVERIFIED, SlotRecord
from kvpool_core.wire import EXISTS, FULL, SLOT, StoreKey

COPY_GRACE_NS = 10_000_000_000
"""A copy that began at the last permitted moment has ended 10 s later: it takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker process of an engine: `payload_bytes` of a block by group."""

    owner: int
    rank: int
    world_size: int
    payload_bytes: Mapping[int, int]


class SlotStore:
    """Everything that is decided about slots in use."""

    def __init__(self, pool: SlotPool, *, write_lease_ns: int) -> None:
        self.pool = pool
        self.jobs = JobBook()
        self.leases = LeaseBook(pool.writer, self.unpin)
        self.accepting = True
        self._write_lease_ns = write_lease_ns
        self._connected: set[tuple[int, int]] = set()

    # --- stores ---------------------------------------------------------------------------------------------------

    def reserve(
        self, rank: Rank, number: int, domain: bytes, keys: Sequence[StoreKey], *, private: bool, now_ns: int
    ) -> Reservation | None:
        """Slots for a job's keys, the same answer for each rank; None when a rank asks for other keys than the first did."""
        job = self.jobs.get(rank.owner, number)
        if job is not None and job.answer is not None:
            return job.answer if job.domain == domain and list(job.keys) == list(keys) else None
        if job is not None or self.jobs.has_failed(rank.owner, number) or not self.accepting:
            return Reservation(bytes([FULL]) * len(keys), [0] * len(keys), [0] * len(keys), 0)
        until_ns = now_ns + self._write_lease_ns
        job = Job(rank.owner, number, until_ns, set(range(rank.world_size)), domain=domain, keys=keys)
        job.answer = self._reserve_keys(job, rank.payload_bytes, flags=PRIVATE if private else 0)
        self.jobs.add(job)
        return job.answer

    def _reserve_keys(self, job: Job, payload_bytes: Mapping[int, int], *, flags: int) -> Reservation:
        kinds = bytearray()
        granted: list[Slot | None] = []
        refused: set[tuple[int, bytes]] = set()
        recency = self.pool.next_recency(len(job.keys))
        for number, key in enumerate(job.keys):
            kind, slot = self._reserve_key(job, key, refused, payload_bytes[key.group], flags)
            if slot is not None:
                self.pool.set_recency(slot, recency - number)
            kinds.append(kind)
            granted.append(slot if kind == SLOT else None)
        job.slots = [slot for slot in granted if slot is not None]
        return Reservation(
            bytes(kinds),
            [slot.index if slot else 0 for slot in granted],
            [slot.generation if slot else 0 for slot in granted],
            job.until_ns - min(COPY_GRACE_NS, self._write_lease_ns // 2),
        )

    def _reserve_key(
        self, job: Job, key: StoreKey, refused: set[tuple[int, bytes]], payload_bytes: int, flags: int
    ) -> tuple[int, Slot | None]:
        home = self.pool.find(job.domain, key.group)
        present = home.slots.get(key.block_hash) if home else None
        if present is not None:
            return EXISTS, present
        slot = None
        if (key.group, key.parent) not in refused:  # a block whose parent has no room would never be found
            slot = self.pool.begin(
                job.domain, key, payload_bytes, flags=flags, owner=job.owner, lease_until_ns=job.until_ns
            )
        if slot is None:
            refused.add((key.group, key.block_hash))
            return FULL, None
        return SLOT, slot

    def ack(self, owner: int, number: int, rank: int) -> list[Slot]:
        """A rank has copied its part; returns the slots that became READY with it."""
        job = self.jobs.get(owner, number)
        if job is None or job.waiting is None:
            return []
        job.waiting.discard(rank)
        return self._settle(job)

    def abort(self, rank: Rank, number: int, now_ns: int) -> None:
        """A rank copies nothing more: the job fails, its slots are free once every rank is done."""
        job = self.jobs.get(rank.owner, number)
        if job is None:
            if self.jobs.has_failed(rank.owner, number):
                return
            job = Job(rank.owner, number, now_ns + self._write_lease_ns, set(range(rank.world_size)))
            self.jobs.add(job)
        self._fail(job)
        if job.waiting is not None:
            job.waiting.discard(rank.rank)
        self._settle(job)

    def rank_connected(self, owner: int, rank: int) -> None:
        """A rank's process is there: while it is, only its own word ends its copies, however long they take."""
        self._connected.add((owner, rank))

    def rank_lost(self, owner: int, rank: int) -> list[int]:
        """A rank's connection is gone: what it has not acknowledged will never be readable, and it may still be copying.

        Returns the jobs concerned.
        """
        self._connected.discard((owner, rank))
        lost = [job for job in self.jobs.of(owner) if job.waiting is not None and rank in job.waiting]
        for job in lost:
            self._fail(job)
        return [job.number for job in lost]

    def rank_done(self, owner: int, rank: int, world_size: int, numbers: Sequence[int] | None = None) -> None:
        """A rank announced itself anew, or its process is known gone: it copies nothing more for these (None: all) jobs."""
        for job in self.jobs.of(owner):
            if numbers is not None and job.number not in numbers:
                continue
            if job.waiting is None:
                job.waiting = set(range(world_size))
            if rank in job.waiting:
                self._fail(job)
                job.waiting.discard(rank)
                self._settle(job)

    def _fail(self, job: Job) -> None:
        if not job.failed:
            job.failed = True
            self.pool.observer.job_ended(stored=False)
            for slot in job.slots:
                self.pool.hide(slot)

    def _settle(self, job: Job) -> list[Slot]:
        """End the job if no rank may still be writing; returns what became READY."""
        if job.waiting is None or job.waiting:
            return []
        self.jobs.end(job)
        if job.failed:
            for slot in job.slots:
                self.pool.free(slot)
            return []
        self.pool.observer.job_ended(stored=True)
        for slot in job.slots:
            self.pool.make_ready(slot)
        return job.slots

    # --- fetches --------------------------------------------------------------------------------------------------

    def begin_fetch(self, domain: bytes, key: StoreKey, payload_bytes: int) -> Slot | None:
        """A slot that the agent fills itself; None when there is no room or the block is there already."""
        home = self.pool.find(domain, key.group)
        if not self.accepting or (home is not None and key.block_hash in home.slots):
            return None
        slot = self.pool.begin(domain, key, payload_bytes, flags=0, owner=AGENT_OWNER, lease_until_ns=0)
        if slot is not None:
            slot.fetching = True
        return slot

    def end_fetch(self, slot: Slot, checksum: int | None) -> None:
        """The payload is there with this checksum, or (None) will not come."""
        slot.fetching = False
        if checksum is None:
            self.pool.hide(slot)
            self.pool.free(slot)
            return
        self.set_checksum(slot, checksum)
        self.pool.make_ready(slot)

    # --- pins and checksums -----------------------------------------------------------------------------------------

    def pin(self, slot: Slot) -> bool:
        """Hold a READY slot so that its payload stays; False when it is gone."""
        if slot.state != READY:
            return False
        slot.holds += 1
        return True

    def unpin(self, slot: Slot) -> None:
        """End one hold."""
        slot.holds -= 1
        if slot.holds:
            return
        if slot.lease_until_ns:
            slot.lease_until_ns = 0
            self.pool.writer.lease(slot.index, 0)
        if slot.doomed:
            self.pool.free(slot)
        else:
            self.pool.offer(slot)

    def set_checksum(self, slot: Slot, checksum: int) -> None:
        """The payload's xxh3-64 is known (and, for a slot taken over, verified)."""
        slot.checksum = checksum
        slot.flags = (slot.flags | CHECKSUM_VALID) & ~UNVERIFIED
        self.pool.writer.checksum(slot.index, checksum, slot.flags)

    def drop(self, slot: Slot) -> None:
        """The payload is not what it should be: readers fail from now on; freed when nobody holds it."""
        if slot.state != READY:
            return
        self.pool.hide(slot)
        if slot.holds:
            slot.doomed = True
        else:
            self.pool.free(slot)

    # --- time -------------------------------------------------------------------------------------------------------

    def expire(self, now_ns: int) -> tuple[int, int]:
        """End what has lasted too long; returns how many (leases, jobs) did."""
        jobs = 0
        for job in self.jobs.expired(now_ns):
            self._fail(job)
            job.waiting = {rank for rank in job.waiting or () if (job.owner, rank) in self._connected}
            if job.waiting:  # a process that was frozen in the middle of a copy goes on with it when it wakes up
                self.jobs.extend(job, now_ns + self._write_lease_ns)
                for slot in job.slots:
                    self.pool.writer.lease(slot.index, job.until_ns)
            else:
                self._settle(job)
            jobs += 1
        return self.leases.expire(now_ns), jobs

    # --- taking over ------------------------------------------------------------------------------------------------

    def adopt(self, takeover: Takeover) -> int:
        """Carry a former agent's slots over; returns how many blocks live on. Call once, before anything else."""
        for index, generation in takeover.generations.items():
            self.pool.writer.generation(index, generation + 1)  # of those that live on, the record is written next
        adopted = sum(self._adopt_ready(index, record) for index, record in takeover.ready)
        for index, record in takeover.quarantined:
            self._adopt_quarantined(index, record)
        used = {slot.index for slot in self.pool.slots()}
        self.pool.allocator.finish_adoption(used, max(takeover.generations, default=-1) + 1)
        for slot in self.pool.slots():
            self.pool.offer(slot)
        return adopted

    def _adopt_ready(self, index: int, record: SlotRecord) -> bool:
        home = self.pool.find(record.domain, record.group)
        if home is not None and record.block_hash in home.slots:
            return False
        chunk = self.pool.allocator.adopt(index, record.payload_offset, record.payload_bytes)
        if chunk is None:
            return False
        slot = self.pool.register(chunk, record, indexed=True)
        self.pool.recency = max(self.pool.recency, slot.recency)
        if record.lease_until_ns:
            self.leases.replace("", f"takeover:{index}", [slot], record.lease_until_ns)
        return True

    def _adopt_quarantined(self, index: int, record: SlotRecord) -> None:
        chunk = self.pool.allocator.adopt(index, record.payload_offset, record.payload_bytes)
        if chunk is None:
            return
        slot = self.pool.register(chunk, record, indexed=False)
        self.jobs.add(Job(record.owner, -1 - index, record.lease_until_ns, None, failed=True, slots=[slot]))
