"""Checksums against everything that can become of a block while its payload is being read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvpool_agent.allocator import SlabAllocator
from kvpool_agent.arena import Arena, ArenaFds
from kvpool_agent.checksums import Checksums
from kvpool_agent.memfd import create_payload, seal_payload
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.slot import Slot
from kvpool_agent.slot_pool import SlotPool
from kvpool_agent.slot_store import Rank, SlotStore
from kvpool_agent.slot_writer import SlotWriter
from kvpool_core.slot_table import CHECKSUM_VALID, READY, UNVERIFIED, unpack_record
from kvpool_core.wire import StoreKey

CAPACITY = 64 << 20
SIZE = 2 << 20
SLOTS = CAPACITY // SIZE
DOMAIN = b"d" * 16
RANK = Rank(1, 0, 1, {0: SIZE})


class Quiet:
    """Observer that is not asked."""

    def block_stored(self, slot: Slot) -> None:
        del slot

    def block_removed(self, slot: Slot, *, evicted: bool) -> None:
        del slot, evicted

    def job_ended(self, *, stored: bool) -> None:
        del stored


@dataclass
class Bench:
    """A store over a real arena, with its checksums."""

    arena: Arena
    store: SlotStore = field(init=False)
    told: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        allocator = SlabAllocator(CAPACITY, self.arena.records)
        pool = SlotPool(SlotWriter(self.arena.table), allocator, Quiet(), generation_base=0)
        self.store = SlotStore(pool, write_lease_ns=1)
        self.metrics = AgentMetrics(CollectorRegistry())
        self.checksums = Checksums(self.store, self.arena, self.metrics, self.told.append)
        self.jobs = 0

    def commit(self, number: int) -> Slot:
        """One block with a payload of its own, written over whatever was there."""
        self.jobs += 1
        key = StoreKey(0, number.to_bytes(32, "big"), b"", 0)
        answer = self.store.reserve(RANK, self.jobs, DOMAIN, [key], private=False, now_ns=0)
        assert answer is not None
        slot = self.store.pool.at(answer.slots[0])
        assert slot is not None
        self.arena.block(slot.chunk.offset, SIZE)[:] = number.to_bytes(4, "little") * (SIZE // 4)
        ready = self.store.ack(RANK.owner, self.jobs, RANK.rank)
        assert ready == [slot]
        self.checksums.enqueue(ready)
        return slot

    def assert_true(self) -> None:
        """Every checksum in the table is that of the payload in the slot, and nothing is held."""
        for slot in self.store.pool.slots():
            record = unpack_record(self.arena.table, slot.index)
            assert (record.state, slot.holds) == (READY, 0)
            if record.flags & CHECKSUM_VALID:
                payload = self.arena.block(slot.chunk.offset, slot.payload_bytes)
                assert record.checksum == slot.checksum == xxhash.xxh3_64_intdigest(payload)


def run(scenario: Callable[[Bench], Coroutine[object, object, None]]) -> None:
    """The scenario on a fresh bench."""
    payload_fd = create_payload(CAPACITY, 0)
    seal_payload(payload_fd)
    arena = Arena(ArenaFds(b"a" * 16, CAPACITY, 0, payload_fd, None), boot_id=b"b" * 16)

    async def with_bench() -> None:
        bench = Bench(arena)
        try:
            await scenario(bench)
        finally:
            bench.checksums.close()

    try:
        asyncio.run(with_bench())
    finally:
        for fd in arena.descriptors():
            os.close(fd)


async def begun(bench: Bench) -> asyncio.Task[None]:
    """Hashing is under way, and its end is not known to the loop yet."""
    task = asyncio.create_task(bench.checksums.flush())
    await asyncio.sleep(0)
    return task


def test_blocks_being_hashed_still_wait() -> None:
    """Draining ends when nothing waits: what has no checksum would not be written, nor outlive the agent."""

    async def scenario(bench: Bench) -> None:
        slots = [bench.commit(number) for number in range(1, 4)]
        task = await begun(bench)
        assert bench.checksums.waiting == 3
        assert bench.told == []
        await task
        assert (bench.checksums.waiting, bench.told) == (0, slots)
        bench.assert_true()

    run(scenario)


def test_hashing_that_is_cut_short_is_done_anew() -> None:
    async def scenario(bench: Bench) -> None:
        slots = [bench.commit(number) for number in range(1, 4)]
        task = await begun(bench)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (bench.checksums.waiting, bench.told) == (3, [])
        await bench.checksums.flush()
        assert (bench.checksums.waiting, bench.told) == (0, slots)
        bench.assert_true()

    run(scenario)


def _taken_over(slots: list[Slot]) -> Iterator[Slot]:
    for slot in slots:
        slot.flags |= UNVERIFIED
        yield slot


def test_block_found_damaged_by_several_is_dropped_once_and_a_good_one_becomes_readable_whoever_gives_up() -> None:
    async def scenario(bench: Bench) -> None:
        good, bad = bench.commit(1), bench.commit(2)
        await bench.checksums.flush()
        slots = list(_taken_over([good, bad]))
        bench.arena.block(bad.chunk.offset, 1)[0] ^= 1
        lookups = [asyncio.create_task(bench.checksums.verify(slots, where="takeover")) for _ in range(3)]
        await asyncio.sleep(0)
        lookups[0].cancel()
        await asyncio.gather(*lookups, return_exceptions=True)
        assert (good.readable, bad.gone) == (True, True)
        failures = bench.metrics.registry.get_sample_value(
            "kvpool_agent_checksum_failures_total", {"where": "takeover"}
        )
        assert failures == 1
        bench.assert_true()

    run(scenario)


_STEPS = st.lists(
    st.tuples(st.sampled_from(["commit", "flush", "cancel", "verify", "drop", "turn"]), st.integers(0, SLOTS)),
    max_size=60,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(_STEPS)
def test_no_block_has_the_checksum_of_another_whatever_happens_meanwhile(steps: list[tuple[str, int]]) -> None:
    """More blocks than slots: eviction and new contents come in between."""

    async def scenario(bench: Bench) -> None:
        tasks: list[asyncio.Task[None]] = []
        numbers = 0
        for action, number in steps:
            slots = bench.store.pool.slots()
            if action == "commit":
                for _ in range(number):
                    numbers += 1
                    _commit_if_there_is_room(bench, numbers)
            elif action == "flush":
                tasks.append(asyncio.create_task(bench.checksums.flush()))
            elif action == "verify":
                valid = [slot for slot in slots if slot.flags & CHECKSUM_VALID]
                tasks.append(asyncio.create_task(bench.checksums.verify(valid[:number], where="scrub")))
            elif action == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif action == "drop" and slots:
                bench.store.drop(slots[number % len(slots)])
            else:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        await bench.checksums.flush()
        bench.assert_true()
        assert all(slot.flags & CHECKSUM_VALID for slot in bench.store.pool.slots())
        assert bench.checksums.waiting == 0

    run(scenario)


def _commit_if_there_is_room(bench: Bench, number: int) -> None:
    """A slot that is being hashed makes none."""
    slots = bench.store.pool.slots()
    if len(slots) < SLOTS // 2 or not all(slot.holds for slot in slots):
        bench.commit(number)
