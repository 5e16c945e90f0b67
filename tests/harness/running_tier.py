"""A Valkey tier on an event loop of its own thread, driven from a test.

Owns the loop and its thread. Invariant: when the context is left the tier is stopped and the loop closed, whatever failed.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
import xxhash
from prometheus_client import CollectorRegistry

from kvpool_agent.valkey_keys import slot_of
from kvpool_agent.valkey_settings import ValkeySettings
from kvpool_agent.valkey_tier import BlockKey, FetchItem, FetchOutcome, ValkeyTier, WriteItem
from tests.harness.valkey_cluster import ValkeyServers

T = TypeVar("T")

PREFIX = "kvpool:test/pool:"
DOMAIN = bytes(range(16))
KIB = 1024
WAIT_SECONDS = 15.0
RECOVERY_SECONDS = 10.0
BASE_TIMEOUT_SECONDS = 1.0
UNTOUCHED = 0xAA

_numbers = itertools.count()


def new_key(domain: bytes = DOMAIN, group: int = 0) -> BlockKey:
    return BlockKey(domain, group, xxhash.xxh3_128_digest(str(next(_numbers)).encode()) * 2)


def key_on(servers: ValkeyServers, shard: int) -> BlockKey:
    while True:
        if servers.shard_of_slot(slot_of(key := new_key())) == shard:
            return key


def payload_of(key: BlockKey, size: int) -> bytes:
    return (key.block_hash * (size // 32 + 1))[:size]


def eventually(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {seconds} s"
        time.sleep(0.02)


@dataclass(frozen=True)
class Fetched:
    outcome: FetchOutcome
    payload: bytes
    checksum: int
    seconds: float


class RunningTier:
    """A tier on a loop of its own thread, driven from the test; `ticks`: the loop counts on every 10 ms."""

    def __init__(self, endpoints: Sequence[str], **settings: Any) -> None:
        defaults: dict[str, Any] = {"base_timeout_seconds": BASE_TIMEOUT_SECONDS, "breaker_open_seconds": 0.5}
        self.settings = ValkeySettings(endpoints=list(endpoints), key_prefix=PREFIX, **(defaults | settings))
        self.settings.validate()
        self.hints: list[tuple[str, BlockKey | None]] = []
        self.registry = CollectorRegistry()
        self.ticks = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self.tier = ValkeyTier(
            self.settings,
            loop=self.loop,
            on_hint=lambda kind, key: self.hints.append((kind, key)),
            registry=self.registry,
        )

    def __enter__(self) -> RunningTier:
        self._is_ticking = True
        self._thread.start()
        self.tier.start()
        self._ticker = asyncio.run_coroutine_threadsafe(self._tick(), self.loop)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0.0)
        self._is_ticking = False
        self._ticker.result(WAIT_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def stop(self, flush_seconds: float) -> None:
        self.run(self.tier.stop(flush_seconds))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def state(self) -> object:
        return self.tier.stats()["state"]

    def until(self, state: str, seconds: float = WAIT_SECONDS) -> RunningTier:
        eventually(lambda: self.state() == state, seconds)
        return self

    def write(self, key: BlockKey, payload: bytes) -> threading.Event | None:
        """An event that is set when the block is stored (or failed: then never); None when it was dropped at once."""
        stored = threading.Event()

        async def put() -> bool:
            item = WriteItem(key, lambda: memoryview(payload), lambda ok: stored.set() if ok else None)
            return self.tier.write(item)

        return stored if self.run(put()) else None

    def store(self, key: BlockKey, size: int) -> bytes:
        payload = payload_of(key, size)
        stored = self.write(key, payload)
        assert stored is not None
        assert stored.wait(WAIT_SECONDS)
        return payload

    def fetch(self, key: BlockKey, size: int) -> Fetched:
        return self.fetch_all([(key, size)])[0]

    def fetch_all(self, wanted: Sequence[tuple[BlockKey, int]]) -> list[Fetched]:
        targets = [bytearray([UNTOUCHED]) * size for _, size in wanted]
        got: dict[int, Fetched] = {}
        started = time.monotonic()

        def on_result(index: int, outcome: FetchOutcome, checksum: int) -> None:
            assert index not in got
            assert threading.current_thread() is self._thread
            got[index] = Fetched(outcome, bytes(targets[index]), checksum, time.monotonic() - started)

        items = [FetchItem(key, memoryview(target)) for (key, _), target in zip(wanted, targets, strict=True)]
        self.run(self.tier.fetch(items, on_result, threading.Event()))
        return [got[index] for index in range(len(wanted))]

    def exists(self, *keys: BlockKey, seconds: float = 5.0) -> list[bool]:
        return self.run(self.tier.exists(keys, seconds))

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    async def _tick(self) -> None:
        while self._is_ticking:
            await asyncio.sleep(0.01)
            self.ticks += 1


def reader(servers: ValkeyServers, shard: int = 0) -> redis.Redis:
    return redis.Redis(host="127.0.0.1", port=servers.ports[shard], password=servers.password, socket_timeout=5)
