"""The agent of one node: everything that lives as long as its arena is served.

Invariant: all state is touched on the event loop only; threads get pinned payloads and give results back to the loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from contextlib import suppress

import msgspec

from kvpool_agent.allocator import SlabAllocator
from kvpool_agent.arena import Arena
from kvpool_agent.checksums import Checksums
from kvpool_agent.config import Config
from kvpool_agent.event_feed import EventFeed
from kvpool_agent.events import EventHub, Subscriber
from kvpool_agent.fetches import Fetches
from kvpool_agent.file_digests import FileDigestBook
from kvpool_agent.hints import ValkeyHints
from kvpool_agent.lookup import LookupServices
from kvpool_agent.metrics import AgentMetrics, counter_values
from kvpool_agent.registry import EngineRegistry
from kvpool_agent.slot import Slot
from kvpool_agent.slot_pool import STATE_NAMES, SlotPool
from kvpool_agent.slot_store import SlotStore
from kvpool_agent.slot_writer import SlotWriter
from kvpool_agent.takeover import Takeover
from kvpool_agent.valkey_tier import ValkeyTier
from kvpool_agent.write_through import WriteThrough
from kvpool_core.slot_table import READY
from kvpool_core.wire import Announce, Welcome

EXPIRY_PERIOD_SECONDS = 0.1
"""How late a lease may end."""
FLUSH_DELAY_SECONDS = 0.005
"""Changes of 5 ms travel in one delta: the router's index is that much behind at most."""
DRAIN_POLL_SECONDS = 0.02

log = logging.getLogger("kvpool.agent")


class Agent:
    """Slots, tiers, engines and events of one arena."""

    def __init__(self, config: Config, arena: Arena, *, boot_id: bytes, metrics: AgentMetrics) -> None:
        self.config = config
        self.arena = arena
        self.boot_id = boot_id
        self.metrics = metrics
        self.loop = asyncio.get_running_loop()
        self.hub = EventHub(boot_id, on_dirty=self._flush_soon)
        self.hints = ValkeyHints()
        self.feed = EventFeed(self.hub, self.hints, metrics)
        allocator = SlabAllocator(arena.capacity_bytes, arena.records)
        pool = SlotPool(SlotWriter(arena.table), allocator, self.feed, generation_base=generation_base(time.time()))
        self.store = SlotStore(pool, write_lease_ns=int(config.write_lease_seconds * 1e9))
        self.checksums = Checksums(self.store, arena, metrics, self._on_checksummed)
        self.file_digests = FileDigestBook()
        self.registry = EngineRegistry(self.store, self.feed, metrics, self.loop)
        self.tier = self._build_tier()
        self.fetches = Fetches(self.tier, self.store, arena, metrics) if self.tier else None
        self._write_through = (
            WriteThrough(self.tier, self.store, arena, metrics, self.loop, drop_damaged=self.checksums.drop_damaged)
            if self.tier and config.valkey and config.valkey.write_policy == "WriteThrough"
            else None
        )
        self.lookup_services = self._build_lookup_services()
        self.draining = False
        self._declare_gauges()

    # --- life -------------------------------------------------------------------------------------------------------

    def take_over(self, takeover: Takeover) -> None:
        """Carry a former agent's blocks over; before `start`."""
        adopted = self.store.adopt(takeover)
        self.checksums.take_over()
        lost = len(takeover.ready) - adopted + takeover.dropped
        fates = {"kept": adopted, "quarantined": len(takeover.quarantined), "dropped": lost}
        for fate, count in fates.items():
            self.metrics.taken_over_blocks.labels(fate).inc(count)
        log.info("took the arena over", extra={"data": fates})

    def start(self) -> None:
        """Begin to connect to Valkey."""
        if self.tier is not None:
            self.tier.start()

    async def run(self) -> None:
        """The background work, until cancelled; a fault in any part of it ends the agent, which is then restarted."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.checksums.run_commits(), name="checksums")
            group.create_task(self.checksums.run_scrub(), name="scrub")
            group.create_task(self._run_expiry(), name="expiry")

    async def stop(self, flush_seconds: float) -> None:
        """End everything; queued writes to Valkey get `flush_seconds`."""
        self.store.accepting = False
        self.registry.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.checksums.flush(), flush_seconds)
        if self.fetches is not None:
            await self.fetches.stop()
        if self.tier is not None:
            await self.tier.stop(flush_seconds)
        self.checksums.close()

    async def drain(self, timeout_seconds: float) -> bool:
        """Take no more blocks in and wait until what is there is written to Valkey; whether it was, in time."""
        self.draining = True
        self.store.accepting = False
        log.info("draining", extra={"data": {"timeout_seconds": timeout_seconds}})
        deadline = time.monotonic() + timeout_seconds
        while not self._is_flushed():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        return True

    def _is_flushed(self) -> bool:
        written = self.tier is None or not self.tier.stats()["write_queue_items"]
        return not self.checksums.waiting and written

    # --- sessions ---------------------------------------------------------------------------------------------------

    def welcome(self, rid: int, protocol: int) -> Welcome:
        """The answer to Hello."""
        return Welcome(
            rid, protocol, self.boot_id, self.arena.arena_id, self.arena.capacity_bytes, self.config.lease_seconds
        )

    def acked(self, owner: int, job: int, rank: int) -> None:
        """A rank copied its part; what became readable gets its checksum."""
        ready = self.store.ack(owner, job, rank)
        if ready:
            self.checksums.enqueue(ready)

    def renew_leases(self, engine_id: str, message: Announce) -> None:
        """The engine still reads these slots, for these requests, and nothing else."""
        wanted: dict[str, list[Slot]] = {}
        for request, index, generation in zip(message.requests, message.slots, message.generations, strict=True):
            slot = self.store.pool.at(index)
            if slot is not None and slot.state == READY and slot.generation == generation:
                wanted.setdefault(request, []).append(slot)
        leases = self.store.leases
        until_ns = time.monotonic_ns() + self.lookup_services.lease_ns
        for request in leases.requests_of(engine_id):
            if request not in wanted:
                leases.release(engine_id, request)
        for request, slots in wanted.items():
            leases.replace(engine_id, request, slots, until_ns)

    def subscribe(self) -> Subscriber | None:
        """A new reader of the event stream; None when there are too many."""
        return self.feed.subscribe([engine.info() for engine in self.registry.engines()], self.store.pool)

    # --- state ------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, object]:
        """What /v1/stats shows."""
        pool = self.store.pool
        return {
            "draining": self.draining,
            "arena": {
                "arena_id": self.arena.arena_id.hex(),
                "capacity_bytes": self.arena.capacity_bytes,
                "used_bytes": pool.allocator.used_bytes,
                "slots": pool.counts(),
                "leases": len(self.store.leases),
                "jobs": len(self.store.jobs),
                "checksums_waiting": self.checksums.waiting,
            },
            "engines": [
                {
                    "engine_id": engine.engine_id,
                    "endpoint": engine.hello.endpoint,
                    "pod": dataclasses.asdict(engine.pod) if engine.pod is not None else None,
                    "dp_rank": engine.dp_rank,
                    "served_names": engine.hello.served_names,
                    "workers": len(engine.workers),
                    "world_size": engine.world_size,
                    "connected": engine.scheduler_connected,
                    "state": engine.domain.state,
                    "domain": engine.domain.domain.hex(),
                    "reason": engine.domain.reason,
                    "groups": [msgspec.structs.asdict(group) for group in engine.domain.groups],
                }
                for engine in self.registry.engines()
            ],
            "valkey": self.tier.stats() if self.tier is not None else None,
            "events": {"seq": self.hub.seq, "subscribers": len(self.hub), "valkey_hints": len(self.hints)},
            "counters": counter_values(self.metrics.registry),
        }

    # --- inside -----------------------------------------------------------------------------------------------------

    def _build_tier(self) -> ValkeyTier | None:
        if self.config.valkey is None:
            return None
        return ValkeyTier(self.config.valkey, loop=self.loop, on_hint=self.feed.hint, registry=self.metrics.registry)

    def _build_lookup_services(self) -> LookupServices:
        return LookupServices(
            store=self.store,
            checksums=self.checksums,
            fetches=self.fetches,
            hints=self.hints,
            metrics=self.metrics,
            lease_ns=int(self.config.lease_seconds * 1e9),
            lease_limit_bytes=int(self.config.max_lease_fraction * self.arena.capacity_bytes),
        )

    def _flush_soon(self) -> None:
        self.loop.call_later(FLUSH_DELAY_SECONDS, self.hub.flush)

    def _on_checksummed(self, slot: Slot) -> None:
        if self._write_through is not None:
            self._write_through.offer(slot)

    async def _run_expiry(self) -> None:
        while True:
            leases, jobs = self.store.expire(time.monotonic_ns())
            if jobs:
                log.info("writes or leases ended by time", extra={"data": {"leases": leases, "jobs": jobs}})
            await asyncio.sleep(EXPIRY_PERIOD_SECONDS)

    def _declare_gauges(self) -> None:
        metrics, pool = self.metrics, self.store.pool
        metrics.arena_used_bytes.set_function(lambda: pool.allocator.used_bytes)
        metrics.leases.set_function(lambda: len(self.store.leases))
        metrics.subscribers.set_function(lambda: len(self.hub))
        for name in STATE_NAMES.values():
            metrics.slots.labels(name).set_function(lambda name=name: pool.counts()[name])  # type: ignore[misc]
        for state in ("pending", "known", "refused"):
            metrics.engines.labels(state).set_function(lambda state=state: self.registry.count(state))  # type: ignore[misc]


def generation_base(unix_seconds: float) -> int:
    """Where generations of never-used slots begin: above all that an earlier table, now lost, can have given out."""
    return int(unix_seconds * 1000) << 16
