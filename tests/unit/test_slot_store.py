"""The block store against a naive model of who may be reading and writing what."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool_agent.allocator import SlabAllocator
from kvpool_agent.slot import Slot
from kvpool_agent.slot_pool import SlotPool
from kvpool_agent.slot_store import Rank, SlotStore
from kvpool_agent.slot_writer import SlotWriter
from kvpool_agent.takeover import decide
from kvpool_agent.write_jobs import Reservation, owner_of
from kvpool_core.slot_table import (
    CHECKSUM_VALID,
    FREE,
    PRIVATE,
    READY,
    UNVERIFIED,
    SlotRecord,
    read_state,
    table_bytes,
    unpack_record,
)
from kvpool_core.wire import EXISTS, FULL, SLOT, StoreKey

CAPACITY = 64 << 20
RECORDS = 256
SIZES = {0: 2 << 20, 1: 4 << 20}
WRITE_LEASE_NS = 100
DOMAIN = b"d" * 16
WORLDS = {"a": 1, "b": 2}


class Watch:
    """Observer that checks what it is told."""

    def __init__(self) -> None:
        self.ready: dict[tuple[int, bytes], Slot] = {}
        self.evicted_parents: list[bytes] = []

    def block_stored(self, slot: Slot) -> None:
        assert (slot.home.group, slot.block_hash) not in self.ready
        self.ready[slot.home.group, slot.block_hash] = slot

    def block_removed(self, slot: Slot, *, evicted: bool) -> None:
        assert self.ready.pop((slot.home.group, slot.block_hash)) is slot
        if evicted:
            assert not slot.holds, "a held slot was evicted"
            if any(other.parent == slot.block_hash for other in slot.home.slots.values()):
                self.evicted_parents.append(slot.block_hash)

    def job_ended(self, *, stored: bool) -> None:
        del stored


def build(table: bytearray, watch: Watch, *, generation_base: int = 0) -> SlotStore:
    """A store over a plain buffer."""
    writer = SlotWriter(memoryview(table))
    pool = SlotPool(writer, SlabAllocator(CAPACITY, RECORDS), watch, generation_base=generation_base)
    return SlotStore(pool, write_lease_ns=WRITE_LEASE_NS)


def new_table() -> bytearray:
    return bytearray(table_bytes(RECORDS))


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def key(chain: int, position: int, group: int = 0) -> StoreKey:
    """Block `position` of a chain."""
    parent = block_hash(chain * 1000 + position) if position else b""
    return StoreKey(group, block_hash(chain * 1000 + position + 1), parent, position)


def rank_of(engine: str, rank: int = 0, world_size: int = 1) -> Rank:
    return Rank(owner_of(engine), rank, world_size, SIZES)


@dataclass
class Writing:
    """What the model knows of a job: ranks that may still be writing, and the ranges they may write."""

    reservation: Reservation
    until_ns: int
    pending: set[int]
    ranges: list[tuple[int, int, int, int]]  # slot, generation, offset, size
    failed: bool = False
    orphan: bool = False  # begun with a former agent: only Announce or time ends it


class StoreMachine(RuleBasedStateMachine):
    """Two engines: "a" with one rank, "b" with two."""

    def __init__(self) -> None:
        super().__init__()
        self.table = new_table()
        self.watch = Watch()
        self.store = build(self.table, self.watch)
        self.now = 1
        self.next_job = 0
        self.jobs: dict[tuple[str, int], Writing] = {}
        self.keys: dict[tuple[str, int], list[StoreKey]] = {}
        self.leases: dict[tuple[str, str], tuple[int, list[tuple[int, int]]]] = {}
        self.fetches: list[Slot] = []
        self.pins: list[Slot] = []
        self.seen: dict[tuple[int, int], bytes] = {}
        self.used: set[int] = set()

    # --- stores

    @rule(
        engine=st.sampled_from(["a", "b"]),
        chain=st.integers(0, 4),
        start=st.integers(0, 6),
        count=st.integers(0, 8),
        group=st.integers(0, 1),
    )
    def reserve(self, engine: str, chain: int, start: int, count: int, group: int) -> None:
        self.next_job += 1
        keys = [key(chain, position, group) for position in range(start, start + count)]
        world = WORLDS[engine]
        answer = self.store.reserve(
            rank_of(engine, 0, world), self.next_job, DOMAIN, keys, private=False, now_ns=self.now
        )
        assert answer is not None
        ranges = []
        for kind, slot, generation, wanted in zip(answer.kinds, answer.slots, answer.generations, keys, strict=True):
            if kind != SLOT:
                continue
            record = unpack_record(memoryview(self.table), slot)
            assert (record.generation, record.block_hash) == (generation, wanted.block_hash)
            assert (slot, generation) not in self.seen, "a generation repeats"
            self.seen[slot, generation] = wanted.block_hash
            ranges.append((slot, generation, record.payload_offset, SIZES[group]))
        job = (engine, self.next_job)
        self.jobs[job] = Writing(answer, self.now + WRITE_LEASE_NS, set(range(world)), ranges)
        self.keys[job] = keys

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def second_rank_reserves(self, data: st.DataObject) -> None:
        engine, number = job = data.draw(st.sampled_from(sorted(self.jobs)))
        if self.jobs[job].orphan:
            return
        world = WORLDS[engine]
        rank = rank_of(engine, world - 1, world)
        answer = self.store.reserve(rank, number, DOMAIN, self.keys[job], private=False, now_ns=self.now)
        if self.store.jobs.get(owner_of(engine), number) is not None:
            assert answer == self.jobs[job].reservation
        wrong = [*self.keys[job], key(9, 9)]
        if self.store.jobs.get(owner_of(engine), number) is not None:
            assert self.store.reserve(rank, number, DOMAIN, wrong, private=False, now_ns=self.now) is None

    def _settled(self, job: tuple[str, int]) -> None:
        writing = self.jobs[job]
        if writing.pending:
            return
        del self.jobs[job]
        for slot, generation, _offset, _size in writing.ranges:
            state = read_state(memoryview(self.table), slot)
            assert (state == (generation, READY)) is not writing.failed

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), abort=st.booleans())
    def finish_rank(self, data: st.DataObject, abort: bool) -> None:
        engine, number = job = data.draw(st.sampled_from(sorted(self.jobs)))
        rank = data.draw(st.sampled_from(sorted(self.jobs[job].pending)))
        if self.jobs[job].orphan:
            assert self.store.ack(owner_of(engine), number, rank) == []
            return
        self.jobs[job].pending.discard(rank)
        if abort:
            self.jobs[job].failed = True
            self.store.abort(rank_of(engine, rank, WORLDS[engine]), number, self.now)
        else:
            for slot in self.store.ack(owner_of(engine), number, rank):
                self.store.set_checksum(slot, slot.generation)
        self._settled(job)

    @rule(engine=st.sampled_from(["a", "b"]), data=st.data(), back=st.booleans())
    def rank_goes(self, engine: str, data: st.DataObject, back: bool) -> None:
        rank = data.draw(st.integers(0, WORLDS[engine] - 1))
        self.store.rank_lost(owner_of(engine), rank)
        concerned = [job for job in self.jobs if job[0] == engine and rank in self.jobs[job].pending]
        for job in concerned:
            self.jobs[job].failed = True
        if back:
            self.store.rank_done(owner_of(engine), rank, WORLDS[engine])
            for job in concerned:
                self.jobs[job].pending.discard(rank)
                self._settled(job)

    # --- reads

    def _ready(self) -> list[Slot]:
        return sorted(self.watch.ready.values(), key=lambda slot: slot.index)

    @rule(engine=st.sampled_from(["a", "b"]), request=st.sampled_from("xyz"), data=st.data())
    def lease(self, engine: str, request: str, data: st.DataObject) -> None:
        ready = self._ready()
        numbers = data.draw(st.lists(st.integers(0, len(ready) - 1), max_size=6, unique=True)) if ready else []
        slots = [ready[number] for number in numbers]
        until = self.now + data.draw(st.integers(1, 150))
        self.store.leases.replace(engine, request, slots, until)
        self.leases[engine, request] = (until, [(slot.index, slot.generation) for slot in slots])

    @rule(engine=st.sampled_from(["a", "b"]), request=st.sampled_from("xyz"))
    def release(self, engine: str, request: str) -> None:
        self.store.leases.release(engine, request)
        self.leases.pop((engine, request), None)

    @precondition(lambda self: self.watch.ready)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = self._ready()[data.draw(st.integers(0, len(self.watch.ready) - 1))]
        assert self.store.pin(slot)
        self.pins.append(slot)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.store.unpin(self.pins.pop())

    @precondition(lambda self: self.watch.ready)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        slot = self._ready()[data.draw(st.integers(0, len(self.watch.ready) - 1))]
        generation = slot.generation
        self.store.drop(slot)
        assert read_state(memoryview(self.table), slot.index)[0] != generation
        gone = (slot.index, generation)
        self.leases = {
            name: (until, [entry for entry in held if entry != gone]) for name, (until, held) in self.leases.items()
        }

    # --- fetches

    @rule(chain=st.integers(0, 4), position=st.integers(0, 8), group=st.integers(0, 1))
    def begin_fetch(self, chain: int, position: int, group: int) -> None:
        slot = self.store.begin_fetch(DOMAIN, key(chain, position, group), SIZES[group])
        if slot is not None:
            assert (slot.index, slot.generation) not in self.seen
            self.seen[slot.index, slot.generation] = slot.block_hash
            self.fetches.append(slot)

    @precondition(lambda self: self.fetches)
    @rule(arrived=st.booleans())
    def end_fetch(self, arrived: bool) -> None:
        slot = self.fetches.pop()
        self.store.end_fetch(slot, 7 if arrived else None)
        assert (slot.state == READY) is arrived

    # --- time and restarts

    @rule(passed=st.integers(1, 120))
    def time_passes(self, passed: int) -> None:
        self.now += passed
        self.store.expire(self.now)
        self.jobs = {job: writing for job, writing in self.jobs.items() if writing.until_ns > self.now}
        self.leases = {name: lease for name, lease in self.leases.items() if lease[0] > self.now}

    @rule()
    def restart(self) -> None:
        """Another agent takes over: engines may still be reading and writing by the former table."""
        old = memoryview(bytes(self.table))
        used = [(index, unpack_record(old, index)) for index in range(1 + max(self.used, default=-1))]
        self.fetches, self.pins = [], []
        self.table, self.watch = new_table(), Watch()
        self.store = build(self.table, self.watch)
        self.store.adopt(decide(iter(used), self.now))
        for slot in list(self.watch.ready.values()):
            assert slot.flags & UNVERIFIED
            self.store.set_checksum(slot, slot.checksum)
        for (engine, _number), writing in self.jobs.items():
            writing.failed = True
            writing.pending = set(range(WORLDS[engine]))
            writing.orphan = True
        self.jobs = {job: writing for job, writing in self.jobs.items() if writing.ranges}

    @invariant()
    def nobody_is_overwritten(self) -> None:
        """Ranges that somebody may still write or read belong to nobody else."""
        in_use = {
            slot.index: (slot.chunk.offset, slot.chunk.offset + slot.payload_bytes) for slot in self.store.pool.slots()
        }
        spans = sorted(in_use.values())
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
        for writing in self.jobs.values():
            for slot, generation, offset, size in writing.ranges:
                assert in_use.get(slot) == (offset, offset + size), "a slot was reused under its writer"
                assert read_state(memoryview(self.table), slot)[0] == generation

    @invariant()
    def leases_are_kept(self) -> None:
        for until, held in self.leases.values():
            for index, generation in held:
                record = unpack_record(memoryview(self.table), index)
                assert (record.generation, record.state) == (generation, READY)
                assert record.lease_until_ns >= until

    @invariant()
    def table_says_what_the_store_thinks(self) -> None:
        assert not self.watch.evicted_parents
        slots = {slot.index: slot for slot in self.store.pool.slots()}
        self.used |= slots.keys()
        for index in self.used - slots.keys():
            assert read_state(memoryview(self.table), index)[1] == FREE
        for index, slot in slots.items():
            record = unpack_record(memoryview(self.table), index)
            found = (record.generation, record.state, record.flags, record.recency, record.payload_offset)
            assert found == (slot.generation, slot.state, slot.flags, slot.recency, slot.chunk.offset)
        assert sum(self.store.pool.counts().values()) == len(slots)
        assert {slot.index for slot in self.watch.ready.values()} == {
            index for index, slot in slots.items() if slot.state == READY
        }


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


# --- single behaviours ------------------------------------------------------------------------------------------------


def _ready(store: SlotStore, keys: list[StoreKey], job: int, *, checksum: bool = True) -> list[Slot]:
    answer = store.reserve(rank_of("a"), job, DOMAIN, keys, private=False, now_ns=0)
    assert answer is not None
    slots = store.ack(owner_of("a"), job, 0)
    if checksum:
        for slot in slots:
            store.set_checksum(slot, 1)
    return slots


def test_least_recently_asked_chain_is_evicted_from_its_end() -> None:
    store = build(new_table(), watch := Watch())
    _ready(store, [key(1, position) for position in range(16)], 1)
    _ready(store, [key(2, position) for position in range(16)], 2)
    for slot in [watch.ready[0, key(1, position).block_hash] for position in range(16)]:
        store.pool.set_recency(slot, store.pool.next_recency(1))
    _ready(store, [key(3, position) for position in range(4)], 3)
    assert [(0, key(2, position).block_hash) in watch.ready for position in range(16)] == [True] * 12 + [False] * 4
    assert all((0, key(1, position).block_hash) in watch.ready for position in range(16))


def test_full_arena_of_leased_blocks_answers_full() -> None:
    store = build(new_table(), Watch())
    slots = _ready(store, [key(1, position) for position in range(32)], 1)
    store.leases.replace("a", "r", slots, 50)
    answer = store.reserve(rank_of("a"), 2, DOMAIN, [key(2, 0), key(2, 1)], private=False, now_ns=0)
    assert answer is not None
    assert answer.kinds == bytes([FULL, FULL])
    store.expire(50)
    assert _ready(store, [key(2, 0)], 3)


def test_slots_of_a_connected_rank_outlive_their_time_until_the_rank_itself_is_done() -> None:
    store = build(new_table(), watch := Watch())
    rank = rank_of("a")
    store.rank_connected(rank.owner, rank.rank)
    answer = store.reserve(rank, 1, DOMAIN, [key(1, 0)], private=False, now_ns=0)
    assert answer is not None
    slot = store.pool.at(answer.slots[0])
    for _round in range(3):  # the process is frozen in its copy: nobody else may get the slot
        store.expire(10**18)
        assert store.pool.at(answer.slots[0]) is slot
        assert not watch.ready
    store.ack(rank.owner, 1, rank.rank)  # it woke up, too late: free, and never readable
    assert store.pool.at(answer.slots[0]) is None
    assert not watch.ready

    store.reserve(rank, 2, DOMAIN, [key(2, 0)], private=False, now_ns=0)
    store.rank_lost(rank.owner, rank.rank)
    store.expire(10**18)
    assert store.pool.counts()["quarantined"] == 0


def test_block_whose_parent_got_no_room_is_not_stored_either() -> None:
    store = build(new_table(), Watch())
    slots = _ready(store, [key(1, position) for position in range(32)], 1)
    store.leases.replace("a", "r", slots[:-1], 50)
    keys = [key(2, 0, group=1), key(2, 1, group=1), key(2, 0)]
    answer = store.reserve(rank_of("a"), 2, DOMAIN, keys, private=False, now_ns=0)
    assert answer is not None
    assert answer.kinds == bytes([FULL, FULL, SLOT])


def test_cold_blocks_of_another_size_make_room() -> None:
    store = build(new_table(), watch := Watch())
    _ready(store, [key(1, position) for position in range(32)], 1)
    assert len(_ready(store, [key(2, position, group=1) for position in range(4)], 2)) == 4
    assert [(0, key(1, position).block_hash) in watch.ready for position in range(32)] == [True] * 24 + [False] * 8


def test_draining_store_takes_nothing_in() -> None:
    store = build(new_table(), Watch())
    store.accepting = False
    answer = store.reserve(rank_of("a"), 1, DOMAIN, [key(1, 0)], private=False, now_ns=0)
    assert answer is not None
    assert answer.kinds == bytes([FULL])
    assert store.begin_fetch(DOMAIN, key(1, 0), SIZES[0]) is None


def test_private_blocks_are_marked() -> None:
    store = build(new_table(), Watch())
    store.reserve(rank_of("a"), 1, DOMAIN, [key(1, 0)], private=True, now_ns=0)
    (slot,) = store.ack(owner_of("a"), 1, 0)
    assert slot.flags & PRIVATE


def test_block_without_a_checksum_is_dropped_at_takeover_but_not_reused_while_leased() -> None:
    table = new_table()
    store = build(table, Watch())
    first, second = _ready(store, [key(1, 0), key(1, 1)], 1, checksum=False)
    store.leases.replace("a", "r", [first], 50)
    records = [(slot.index, unpack_record(memoryview(table), slot.index)) for slot in (first, second)]
    takeover = decide(iter(records), 10)
    assert (takeover.ready, takeover.dropped) == ([], 2)
    assert [index for index, _record in takeover.quarantined] == [first.index]
    successor = build(new_table(), watch := Watch())
    assert successor.adopt(takeover) == 0
    assert successor.pool.counts()["quarantined"] == 1
    successor.expire(50)
    assert successor.pool.counts()["quarantined"] == 0
    assert not watch.ready


def test_generations_go_on_after_a_lost_table() -> None:
    store = build(new_table(), Watch(), generation_base=1000)
    (slot,) = _ready(store, [key(1, 0)], 1)
    assert slot.generation == 1001


def test_existing_block_is_offered_as_existing_and_becomes_recent() -> None:
    store = build(new_table(), Watch())
    (slot,) = _ready(store, [key(1, 0)], 1)
    before = slot.recency
    answer = store.reserve(rank_of("a"), 2, DOMAIN, [key(1, 0)], private=False, now_ns=0)
    assert answer is not None
    assert answer.kinds == bytes([EXISTS])
    assert slot.recency > before


def test_corrupt_record_that_overlaps_another_is_not_adopted() -> None:
    def record(offset: int, number: int) -> SlotRecord:
        return SlotRecord(
            1, 0, offset, 1, 1, 5, SIZES[0], 0, 0, READY, CHECKSUM_VALID, DOMAIN, block_hash(number), bytes(32)
        )

    takeover = decide(iter([(0, record(0, 1)), (1, record(4096, 2)), (2, record(2 << 20, 3))]), 0)
    store = build(new_table(), Watch())
    assert store.adopt(takeover) == 2
