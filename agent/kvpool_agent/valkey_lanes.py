"""Work for shards in fair turns: a queue per shard and threads that serve them.

`FairQueue` is pure. Invariant: at most `per_shard` threads work for one shard at a time, so that a hanging shard leaves
threads for the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Lane(Generic[T]):
    items: deque[tuple[T, int]] = field(default_factory=deque)
    running: int = 0


class FairQueue(Generic[T]):
    """Items with a weight in bytes, in order per shard; shards take turns. Not thread-safe."""

    def __init__(self, *, per_shard: int, batch_items: int, batch_bytes: int) -> None:
        self._per_shard = per_shard
        self._batch_items = batch_items
        self._batch_bytes = batch_bytes
        self._lanes: dict[str, _Lane[T]] = {}
        self.items = 0
        self.bytes = 0

    def limit_per_shard(self, threads: int) -> None:
        """Change how many batches of one shard may be under way."""
        self._per_shard = threads

    def put(self, shard: str, item: T, weight: int) -> None:
        """Add an item at the end of its shard's queue."""
        self._lanes.setdefault(shard, _Lane()).items.append((item, weight))
        self.items += 1
        self.bytes += weight

    def take(self) -> tuple[str, list[T]] | None:
        """(shard, batch) of the shard whose turn it is; None when no shard has items and a free place.

        A batch has at least one item, at most `batch_items`, and ends before it would exceed `batch_bytes`.
        """
        for shard, lane in self._lanes.items():
            if lane.items and lane.running < self._per_shard:
                lane.running += 1
                batch = self._cut_batch(lane)
                self._lanes[shard] = self._lanes.pop(shard)  # to the end: the others come first
                return shard, batch
        return None

    def done(self, shard: str) -> None:
        """A batch of the shard has ended."""
        lane = self._lanes[shard]
        lane.running -= 1
        if not lane.running and not lane.items:
            del self._lanes[shard]

    def drain(self) -> list[T]:
        """Take every queued item out."""
        left = [item for lane in self._lanes.values() for item, _ in lane.items]
        for shard, lane in list(self._lanes.items()):
            lane.items.clear()
            if not lane.running:
                del self._lanes[shard]
        self.items = self.bytes = 0
        return left

    @property
    def running(self) -> int:
        """Batches under way."""
        return sum(lane.running for lane in self._lanes.values())

    def _cut_batch(self, lane: _Lane[T]) -> list[T]:
        batch: list[T] = []
        taken = 0
        while lane.items and len(batch) < self._batch_items:
            item, weight = lane.items[0]
            if batch and taken + weight > self._batch_bytes:
                break
            lane.items.popleft()
            batch.append(item)
            taken += weight
        self.items -= len(batch)
        self.bytes -= taken
        return batch


class Lanes(Generic[T]):
    """Threads that run `run(shard, batch)` for what is put in."""

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        batch_items: int,
        batch_bytes: int,
        run: Callable[[str, list[T]], None],
    ) -> None:
        self._queue: FairQueue[T] = FairQueue(per_shard=threads, batch_items=batch_items, batch_bytes=batch_bytes)
        self._run = run
        lock = threading.Lock()
        self._work_there = threading.Condition(lock)
        self._batch_ended = threading.Condition(lock)
        self._is_stopping = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def put(self, shard: str, item: T, weight: int, *, limit_bytes: int | None = None) -> bool:
        """Queue an item; False when that would exceed `limit_bytes` queued, or after `stop`."""
        with self._work_there:
            if self._is_stopping or (limit_bytes is not None and self._queue.bytes + weight > limit_bytes):
                return False
            self._queue.put(shard, item, weight)
            self._work_there.notify()
            return True

    def share_between(self, shards: int) -> None:
        """One shard may use every thread; of several none more than half."""
        with self._work_there:
            self._queue.limit_per_shard(len(self._threads) if shards <= 1 else max(1, len(self._threads) // 2))
            self._work_there.notify_all()

    def depth(self) -> tuple[int, int, int]:
        """(items queued, bytes queued, batches under way)."""
        with self._work_there:
            return self._queue.items, self._queue.bytes, self._queue.running

    def wait_until_idle(self, seconds: float) -> bool:
        """Blocks until nothing is queued or under way; False when `seconds` were not enough."""
        with self._batch_ended:
            return self._batch_ended.wait_for(lambda: not self._queue.items and not self._queue.running, seconds)

    def stop(self, seconds: float) -> list[T]:
        """Take nothing more, wait for what is under way at most `seconds`; the items that were not begun."""
        left: list[T] = []
        give_up_at = time.monotonic() + seconds
        with self._work_there:
            self._is_stopping = True
            left = self._queue.drain()
            self._work_there.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, give_up_at - time.monotonic()))
        return left

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            shard, batch = taken
            try:
                self._run(shard, batch)
            except Exception:
                logger.exception("valkey batch failed unexpectedly shard=%s items=%d", shard, len(batch))
            finally:
                with self._work_there:
                    self._queue.done(shard)
                    self._work_there.notify_all()
                    self._batch_ended.notify_all()

    def _next(self) -> tuple[str, list[T]] | None:
        with self._work_there:
            while True:
                if (taken := self._queue.take()) is not None:
                    return taken
                if self._is_stopping:
                    return None
                self._work_there.wait()
