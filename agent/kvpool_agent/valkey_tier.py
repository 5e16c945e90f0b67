"""The Valkey tier as the agent uses it, from its event loop.

Owns the threads and their queues. Invariant: no call blocks the loop or raises because of Valkey; whatever happens out
there is a miss, a dropped write or an outcome FAILED, in bounded time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from kvpool_agent.valkey_health import ShardHealth
from kvpool_agent.valkey_keys import BlockKey, slot_of
from kvpool_agent.valkey_lanes import Lanes
from kvpool_agent.valkey_link import ValkeyLink
from kvpool_agent.valkey_metrics import ValkeyMetrics
from kvpool_agent.valkey_payload_sizes import PayloadSizes
from kvpool_agent.valkey_reader import FetchJob, FetchOutcome, LookupJob, ValkeyReader
from kvpool_agent.valkey_settings import ValkeySettings
from kvpool_agent.valkey_supervisor import ValkeySupervisor
from kvpool_agent.valkey_writer import ValkeyWriter, WriteItem

__all__ = ["BlockKey", "FetchItem", "FetchOutcome", "ValkeyTier", "WriteItem"]

BATCH_ITEMS = 8
BATCH_BYTES = 1024 * 1024
"""A pipeline carries up to 8 blocks or 1 MiB: deeper gains nothing, and results come in smaller portions."""
ASSUMED_PAYLOAD_BYTES = 256 * 1024
"""For the write queue's limit until the first block of a group was written."""
JOIN_SECONDS = 5.0
"""How long `stop` waits for operations under way; they have deadlines of their own."""


@dataclass(slots=True)
class FetchItem:
    """A block to fetch into `target`: exactly its payload bytes, writable, untouched unless the block is right."""

    key: BlockKey
    target: memoryview


class ValkeyTier:
    """on_hint(kind, key), on the loop: "stored" or "removed" with a key; "cleared" with None: all hints are void."""

    def __init__(
        self,
        settings: ValkeySettings,
        *,
        loop: asyncio.AbstractEventLoop,
        on_hint: Callable[[str, BlockKey | None], None],
        registry: CollectorRegistry,
    ) -> None:
        self._settings = settings
        self._loop = loop
        self._on_hint = on_hint
        self._is_accepting = True
        self._sizes = PayloadSizes()
        self._metrics = ValkeyMetrics(registry)
        self._health = ShardHealth(
            breaker_failures=settings.breaker_failures,
            breaker_open_seconds=settings.breaker_open_seconds,
            metrics=self._metrics,
        )
        self._link = ValkeyLink(settings, self._health, self._metrics)
        self._build_workers()
        self._metrics.write_queue_bytes.set_function(lambda: self._writes.depth()[1])

    def _build_workers(self) -> None:
        settings = self._settings
        reader = ValkeyReader(
            self._link,
            key_prefix=settings.key_prefix,
            may_delete=settings.write_policy != "ReadOnly",
            sizes=self._sizes,
            on_hints=self._hint,
        )
        writer = ValkeyWriter(
            self._link,
            key_prefix=settings.key_prefix,
            ttl_seconds=settings.ttl_seconds,
            sizes=self._sizes,
            on_hints=self._hint,
        )
        reads = settings.read_threads
        self._reads: Lanes[FetchJob] = Lanes(
            "valkey-read", threads=reads, batch_items=BATCH_ITEMS, batch_bytes=BATCH_BYTES, run=reader.fetch_batch
        )
        self._lookups: Lanes[LookupJob] = Lanes(
            "valkey-exists", threads=reads, batch_items=1, batch_bytes=BATCH_BYTES, run=reader.lookup_batch
        )
        self._writes: Lanes[WriteItem] = Lanes(
            "valkey-write",
            threads=settings.write_threads,
            batch_items=BATCH_ITEMS,
            batch_bytes=BATCH_BYTES,
            run=writer.write_batch,
        )
        self._supervisor = ValkeySupervisor(
            settings, self._link, on_cleared=lambda: self._call(self._on_hint, "cleared", None), on_shards=self._share
        )

    # ------------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Start the threads; connecting happens on them, now and for as long as it takes."""
        for lanes in (self._reads, self._lookups, self._writes):
            lanes.start()
        self._supervisor.start()

    async def stop(self, flush_seconds: float) -> None:
        """Take no more writes, give queued ones `flush_seconds`, then end; fetches not begun report FAILED."""
        self._is_accepting = False
        await asyncio.to_thread(self._stop, flush_seconds)

    def _stop(self, flush_seconds: float) -> None:
        if self._link.topology is not None:
            self._writes.wait_until_idle(flush_seconds)
        self._metrics.dropped("stopped", len(self._writes.stop(JOIN_SECONDS)))
        for fetch in self._reads.stop(JOIN_SECONDS):
            fetch.report(FetchOutcome.FAILED, 0)
        for lookup in self._lookups.stop(JOIN_SECONDS):
            lookup.report([False] * len(lookup.keys))
        self._supervisor.stop(JOIN_SECONDS)
        if self._link.topology is not None:
            self._link.topology.close()

    # ---------------------------------------------------------------------------------------------------- reading

    def available(self, key: BlockKey) -> bool:
        """Whether the block's shard is known and in use."""
        return self._usable_shard(key) is not None

    async def exists(self, keys: Sequence[BlockKey], timeout_seconds: float) -> list[bool]:
        """Whether each block is there; unknown, also after `timeout_seconds`, is False."""
        found = [False] * len(keys)
        by_shard: dict[str, list[int]] = {}
        for index, key in enumerate(keys):
            if (shard := self._usable_shard(key)) is not None:
                by_shard.setdefault(shard, []).append(index)
        pending = _Countdown(self._loop, len(by_shard))

        def report(indexes: list[int], answers: list[bool]) -> None:
            for index, answer in zip(indexes, answers, strict=True):
                found[index] = answer
            pending.one_less()

        for shard, indexes in by_shard.items():
            job = LookupJob([keys[i] for i in indexes], partial(self._call, report, indexes))
            if not self._lookups.put(shard, job, 0):
                pending.one_less()
        await pending.wait(timeout_seconds)
        return list(found)

    async def fetch(
        self,
        items: Sequence[FetchItem],
        on_result: Callable[[int, FetchOutcome, int], None],
        cancelled: threading.Event,
    ) -> None:
        """Fetch blocks; on_result(index, outcome, xxh3-64 of the payload when OK), on the loop, once for each item.

        After `cancelled` is set nothing new is begun. Returns when no target is written any more, also when the
        calling task is cancelled.
        """
        pending = _Countdown(self._loop, len(items))
        given_up = threading.Event()

        def report(index: int, outcome: FetchOutcome, checksum: int) -> None:
            try:
                on_result(index, outcome, checksum)
            finally:
                pending.one_less()

        def is_cancelled() -> bool:
            return cancelled.is_set() or given_up.is_set()

        for index, item in enumerate(items):
            shard = self._usable_shard(item.key)
            job = FetchJob(
                item.key,
                item.target,
                partial(self._call, report, index),
                is_cancelled,
            )
            if shard is None or not self._reads.put(shard, job, len(item.target)):
                report(index, FetchOutcome.FAILED, 0)
        await pending.wait_even_if_cancelled(given_up)

    # ---------------------------------------------------------------------------------------------------- writing

    def write(self, item: WriteItem) -> bool:
        """Queue a block; False = dropped. An accepted one can still be dropped before its `read` when a shard fails."""
        if self._settings.write_policy == "ReadOnly":
            return False
        reason = self._reason_to_drop(item)
        if reason is not None:
            self._metrics.dropped(reason)
        return reason is None

    def _reason_to_drop(self, item: WriteItem) -> str | None:
        if not self._is_accepting:
            return "stopped"
        shard = self._link.shard_of(slot_of(item.key))
        if shard is None:
            return "not_connected"
        if not self._health.is_usable(shard):
            return "breaker_open"
        weight = item.payload_bytes or self._sizes.get(item.key) or ASSUMED_PAYLOAD_BYTES
        is_queued = self._writes.put(shard, item, weight, limit_bytes=self._settings.write_queue_bytes)
        return None if is_queued else "queue_full"

    # ------------------------------------------------------------------------------------------------------ state

    def stats(self) -> dict[str, object]:
        """What people and the operator ask for; the names are part of `/v1/stats`.

        write_queue_items: blocks waiting plus batches under way, so 0 = all is written. write_queue_bytes: waiting.
        writing: batches under way. breakers: {shard: closed or why not}. writes_dropped, bad_values: by reason.
        """
        state = self._supervisor.state()
        queued_items, queued_bytes, writing = self._writes.depth()
        bad_values, dropped = self._metrics.tallies()
        return {
            "state": state.state,
            "detail": state.detail,
            "topology": self._link.topology.kind if self._link.topology is not None else "unknown",
            "breakers": self._health.breakers(),
            "write_queue_items": queued_items + writing,
            "write_queue_bytes": queued_bytes,
            "writing": writing,
            "writes_dropped": dropped,
            "bad_values": bad_values,
        }

    def _usable_shard(self, key: BlockKey) -> str | None:
        shard = self._link.shard_of(slot_of(key))
        return shard if shard is not None and self._health.is_usable(shard) else None

    def _share(self, shards: int) -> None:
        for lanes in (self._reads, self._lookups, self._writes):
            lanes.share_between(shards)

    def _hint(self, kind: str, keys: Sequence[BlockKey]) -> None:
        def tell() -> None:
            for key in keys:
                self._on_hint(kind, key)

        self._call(tell)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Run on the loop; nobody listens any more once it is closed."""
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(function, *arguments)
            except RuntimeError:  # closed in between
                return


class _Countdown:
    """Resolves when it was counted down to zero; used on the loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self._left = count
        self._done: asyncio.Future[None] = loop.create_future()
        if not count:
            self._done.set_result(None)

    def one_less(self) -> None:
        self._left -= 1
        if not self._left and not self._done.done():
            self._done.set_result(None)

    async def wait(self, seconds: float) -> None:
        await asyncio.wait([self._done], timeout=seconds)

    async def wait_even_if_cancelled(self, given_up: threading.Event) -> None:
        """Sets `given_up` when the waiting task is cancelled, waits on, and passes the cancellation on at the end."""
        cancellation: asyncio.CancelledError | None = None
        while not self._done.done():
            try:
                await asyncio.wait([self._done])
            except asyncio.CancelledError as error:
                cancellation = error
                given_up.set()
        if cancellation is not None:
            raise cancellation
