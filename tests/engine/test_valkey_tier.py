"""The Valkey tier against real Valkey processes: what is stored comes back, what is wrong does not.

Values are read back with another client (`redis`).
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import xxhash

from kvpool_agent.valkey_keys import part_name
from kvpool_agent.valkey_tier import BlockKey, FetchItem, FetchOutcome, WriteItem
from kvpool_agent.valkey_value import HEADER_BYTES
from tests.harness.running_tier import (
    DOMAIN,
    KIB,
    PREFIX,
    UNTOUCHED,
    WAIT_SECONDS,
    RunningTier,
    eventually,
    key_on,
    new_key,
    payload_of,
    reader,
)
from tests.harness.valkey_cluster import ValkeyServers

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("valkey")


@pytest.fixture(scope="module")
def standalone(folder: Path) -> Iterator[ValkeyServers]:
    with ValkeyServers(folder=folder / "standalone") as servers:
        yield servers


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[ValkeyServers]:
    with ValkeyServers(folder=folder / "cluster", shards=3, cluster=True) as servers:
        yield servers


@pytest.fixture
def tier(standalone: ValkeyServers) -> Iterator[RunningTier]:
    with RunningTier(standalone.endpoints) as running:
        yield running.until("connected")


@pytest.fixture
def cluster_tier(cluster: ValkeyServers) -> Iterator[RunningTier]:
    with RunningTier(cluster.endpoints[:1]) as running:
        yield running.until("connected")


# -------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("size", [1, 4 * KIB, 100_000, 64 * KIB, 2048 * KIB])
def test_block_comes_back_with_its_checksum(tier: RunningTier, size: int) -> None:
    key = new_key()
    payload = tier.store(key, size)
    got = tier.fetch(key, size)
    assert (got.outcome, got.payload, got.checksum) == (FetchOutcome.OK, payload, xxhash.xxh3_64_intdigest(payload))
    assert tier.exists(key, new_key()) == [True, False]


def test_value_is_header_and_payload_for_another_client(tier: RunningTier, standalone: ValkeyServers) -> None:
    key = new_key(group=5)
    payload = tier.store(key, 5000)
    value = reader(standalone).get(f"{PREFIX}{key.domain.hex()}:5:{{{key.block_hash.hex()}}}")
    checksum = xxhash.xxh3_64_intdigest(payload)
    assert isinstance(value, bytes)
    assert struct.unpack_from("<8sHBBI16s32sQQQQ", value) == (
        b"KVPOOLV\x01", 1, 0, 1, 5, key.domain, key.block_hash, 5000, 5000, checksum, checksum,
    )  # fmt: skip
    assert value[96:] == payload


def test_large_block_is_two_values_below_the_allocator_edge(tier: RunningTier, standalone: ValkeyServers) -> None:
    key = new_key()
    payload = tier.store(key, 2048 * KIB)
    name = f"{PREFIX}{key.domain.hex()}:0:{{{key.block_hash.hex()}}}"
    parts = [reader(standalone).get(name), reader(standalone).get(name + ":1")]
    assert all(isinstance(part, bytes) for part in parts)
    first, second = (part for part in parts if isinstance(part, bytes))
    assert len(first) == 2048 * KIB - 64
    assert first[96:] + second[96:] == payload


def test_cluster_spreads_blocks_and_gives_all_back(cluster_tier: RunningTier, cluster: ValkeyServers) -> None:
    keys = [key_on(cluster, shard) for shard in range(3) for _ in range(20)]
    payloads = [cluster_tier.store(key, 64 * KIB) for key in keys]
    got = cluster_tier.fetch_all([(key, 64 * KIB) for key in keys])
    assert [result.payload for result in got] == payloads
    assert all(cluster_tier.exists(*keys))
    for shard in range(3):
        name = part_name(PREFIX, keys[20 * shard], 0)
        assert reader(cluster, shard).exists(name) == 1
    independent = redis.RedisCluster(host="127.0.0.1", port=cluster.ports[2])
    value = independent.get(part_name(PREFIX, keys[0], 0))
    assert isinstance(value, bytes)
    assert payloads[0].startswith(value[96:])
    independent.close()


def test_stored_and_missed_blocks_are_hinted(tier: RunningTier) -> None:
    stored, absent, asked = new_key(), new_key(), new_key()
    tier.store(stored, 100)
    assert tier.fetch(absent, 100).outcome is FetchOutcome.MISS
    assert tier.exists(asked) == [False]
    eventually(lambda: len(tier.hints) >= 3)
    assert tier.hints == [("stored", stored), ("removed", absent), ("removed", asked)]


def test_block_that_another_node_stored_is_not_sent_again(tier: RunningTier) -> None:
    key = new_key()
    tier.store(key, 64 * KIB)
    written = tier.metric("kvpool_valkey_bytes_total", direction="written")
    tier.store(key, 64 * KIB)
    assert tier.metric("kvpool_valkey_bytes_total", direction="written") == written
    assert tier.metric("kvpool_valkey_operations_total", op="set", result="present") == 1


@pytest.mark.parametrize("size", [100, 300 * KIB])
def test_block_that_changed_while_it_waited_is_not_written(tier: RunningTier, size: int) -> None:
    key = new_key()
    told: list[object] = []
    payload = bytearray(payload_of(key, size))
    checksum = xxhash.xxh3_64_intdigest(payload)
    payload[-1] ^= 1
    done = threading.Event()

    def end(is_written: bool) -> None:
        told.append(is_written)
        done.set()

    async def put() -> bool:
        item = WriteItem(
            key, lambda: memoryview(payload), end, checksum=checksum, damaged=lambda: told.append("damaged")
        )
        return tier.tier.write(item)

    assert tier.run(put())
    assert done.wait(WAIT_SECONDS)
    assert told == ["damaged", False]
    assert tier.exists(key) == [False]
    assert tier.metric("kvpool_valkey_operations_total", op="set", result="bad") == 1


def test_block_that_is_gone_when_its_turn_comes_is_skipped(tier: RunningTier) -> None:
    key, asked = new_key(), threading.Event()

    async def put() -> bool:
        def read() -> None:
            asked.set()

        return tier.tier.write(WriteItem(key, read, lambda _: pytest.fail("done without a read")))

    assert tier.run(put())
    assert asked.wait(WAIT_SECONDS)
    tier.store(new_key(), 100)
    assert tier.exists(key) == [False]


# ----------------------------------------------------------------------------------------------------------- identity


def assert_bad(tier: RunningTier, servers: ValkeyServers, key: BlockKey, size: int, reason: str) -> None:
    """The block is a miss, counted under `reason`, deleted, hinted as removed, and the target was not touched."""
    got = tier.fetch(key, size)
    assert got.outcome is FetchOutcome.MISS
    assert got.payload == bytes([UNTOUCHED]) * size
    assert tier.metric("kvpool_valkey_bad_values_total", reason=reason) == 1
    names = [part_name(PREFIX, key, part) for part in (0, 1)]
    eventually(lambda: reader(servers).exists(*names) == 0)
    assert ("removed", key) in tier.hints
    tier.store(key, size)
    assert tier.fetch(key, size).outcome is FetchOutcome.OK


@pytest.mark.parametrize(("part", "position"), [(0, 200), (0, -1), (1, -1)])
def test_flipped_byte_is_a_miss_and_the_value_is_deleted(
    tier: RunningTier, standalone: ValkeyServers, part: int, position: int
) -> None:
    key = new_key()
    tier.store(key, 64 * KIB)
    name = part_name(PREFIX, key, part)
    value = reader(standalone).get(name)
    assert isinstance(value, bytes)
    offset = position % len(value)
    reader(standalone).setrange(name, offset, bytes([value[offset] ^ 1]))
    assert_bad(tier, standalone, key, 64 * KIB, "checksum")


def test_truncated_value_is_a_miss(tier: RunningTier, standalone: ValkeyServers) -> None:
    key = new_key()
    tier.store(key, 1000)
    name = part_name(PREFIX, key, 0)
    reader(standalone).set(name, reader(standalone).getrange(name, 0, 500))
    assert_bad(tier, standalone, key, 1000, "length")


@pytest.mark.parametrize(
    ("value", "reason"),
    [(b"", "truncated_header"), (b"x" * 95, "truncated_header"), (b"x" * 500, "magic")],
    ids=["empty", "short", "long"],
)
def test_foreign_value_is_a_miss(tier: RunningTier, standalone: ValkeyServers, value: bytes, reason: str) -> None:
    key = new_key()
    reader(standalone).set(part_name(PREFIX, key, 0), value)
    assert_bad(tier, standalone, key, 100, reason)


def test_value_of_a_foreign_type_is_a_miss(tier: RunningTier, standalone: ValkeyServers) -> None:
    key = new_key()
    reader(standalone).rpush(part_name(PREFIX, key, 0), "x")
    assert_bad(tier, standalone, key, 100, "type")


def test_other_domain_has_other_blocks(tier: RunningTier) -> None:
    key = new_key()
    tier.store(key, 100)
    other = BlockKey(bytes(16), key.group, key.block_hash)
    assert tier.exists(other) == [False]
    assert tier.fetch(other, 100).outcome is FetchOutcome.MISS


@pytest.mark.parametrize(
    ("domain", "group", "reason"), [(b"other domain 16B", 0, "domain"), (DOMAIN, 9, "group"), (DOMAIN, 0, "block_hash")]
)
def test_value_of_another_block_under_this_name_is_a_miss(
    tier: RunningTier, standalone: ValkeyServers, domain: bytes, group: int, reason: str
) -> None:
    key = new_key()
    stored = BlockKey(domain, group, new_key().block_hash if reason == "block_hash" else key.block_hash)
    tier.store(stored, 100)
    reader(standalone).copy(part_name(PREFIX, stored, 0).decode(), part_name(PREFIX, key, 0).decode())
    assert_bad(tier, standalone, key, 100, reason)


@pytest.mark.parametrize("lost", [0, 1])
def test_block_that_lost_a_part_is_a_miss(tier: RunningTier, standalone: ValkeyServers, lost: int) -> None:
    key = new_key()
    tier.store(key, 64 * KIB)
    reader(standalone).delete(part_name(PREFIX, key, lost))
    assert tier.exists(key) == [False]
    assert tier.fetch(key, 64 * KIB).outcome is FetchOutcome.MISS
    assert tier.metric("kvpool_valkey_operations_total", op="get", result="incomplete") == 1
    if lost == 1:  # without part 1, part 0 is of no use
        eventually(lambda: reader(standalone).exists(part_name(PREFIX, key, 0)) == 0)


def test_block_of_another_size_is_a_miss(tier: RunningTier, standalone: ValkeyServers) -> None:
    key = new_key()
    tier.store(key, 100)
    assert_bad(tier, standalone, key, 200, "length")


# --------------------------------------------------------------------------------------------------------- life times


def test_value_expires_and_storing_again_gives_it_new_life(standalone: ValkeyServers) -> None:
    with RunningTier(standalone.endpoints, ttl_seconds=3600) as tier:
        tier.until("connected")
        key = new_key()
        tier.store(key, 64 * KIB)
        names = [part_name(PREFIX, key, part) for part in (0, 1)]
        assert all(3590 <= int(reader(standalone).ttl(name)) <= 3600 for name in names)
        for name in names:
            reader(standalone).expire(name, 100)
        tier.store(key, 64 * KIB)
        assert tier.metric("kvpool_valkey_operations_total", op="set", result="present") == 1
        assert all(3590 <= int(reader(standalone).ttl(name)) <= 3600 for name in names)


def test_value_without_ttl_stays(tier: RunningTier, standalone: ValkeyServers) -> None:
    key = new_key()
    tier.store(key, 100)
    assert reader(standalone).ttl(part_name(PREFIX, key, 0)) == -1


def test_read_only_tier_neither_writes_nor_deletes(tier: RunningTier, standalone: ValkeyServers) -> None:
    good, bad = new_key(), new_key()
    payload = tier.store(good, 100)
    name = part_name(PREFIX, bad, 0)
    reader(standalone).set(name, b"foreign")
    with RunningTier(standalone.endpoints, write_policy="ReadOnly") as read_only:
        read_only.until("connected")
        assert read_only.write(new_key(), b"x") is None
        assert read_only.fetch(good, 100).payload == payload
        assert read_only.fetch(bad, 100).outcome is FetchOutcome.MISS
        assert read_only.metric("kvpool_valkey_bad_values_total", reason="truncated_header") == 1
    assert reader(standalone).get(name) == b"foreign"


def test_stats_show_an_empty_queue_once_all_is_written(tier: RunningTier) -> None:
    stored = [tier.write(key, payload_of(key, 64 * KIB)) for key in (new_key() for _ in range(20))]
    eventually(lambda: tier.tier.stats()["write_queue_items"] == 0)
    assert all(event is not None and event.is_set() for event in stored)
    assert tier.tier.stats()["write_queue_bytes"] == 0


def test_stop_writes_what_is_queued(standalone: ValkeyServers) -> None:
    keys = [new_key() for _ in range(50)]
    with RunningTier(standalone.endpoints) as tier:
        tier.until("connected")
        stored = [tier.write(key, payload_of(key, 64 * KIB)) for key in keys]
        tier.stop(WAIT_SECONDS)
        assert all(event is not None and event.is_set() for event in stored)
        assert tier.write(new_key(), b"x") is None
    assert all(reader(standalone).exists(part_name(PREFIX, key, 0)) for key in keys)


def test_write_beyond_the_queue_is_dropped(folder: Path) -> None:
    with (
        ValkeyServers(folder=folder / "slow") as servers,
        RunningTier(
            servers.endpoints, write_queue_bytes=300 * KIB, write_threads=1, base_timeout_seconds=WAIT_SECONDS
        ) as tier,
    ):
        tier.until("connected")
        tier.store(new_key(), 100 * KIB)
        servers.pause(0)
        try:
            accepted = [tier.write(key, payload_of(key, 100 * KIB)) for key in (new_key() for _ in range(20))]
        finally:
            servers.resume(0)
        kept = [event for event in accepted if event is not None]
        assert 3 <= len(kept) <= 3 + 8
        assert all(event.wait(WAIT_SECONDS) for event in kept)
        assert tier.metric("kvpool_valkey_writes_dropped_total", reason="queue_full") == 20 - len(kept)
        assert tier.metric("kvpool_valkey_write_queue_bytes") == 0


# --------------------------------------------------------------------------------------------------------- cancelling


def test_cancelled_fetch_begins_nothing_and_reports_all(tier: RunningTier) -> None:
    key = new_key()
    tier.store(key, 64 * KIB)
    outcomes: list[FetchOutcome] = []
    cancelled = threading.Event()
    cancelled.set()
    targets = [memoryview(bytearray(64 * KIB)) for _ in range(50)]
    items = [FetchItem(key, target) for target in targets]
    tier.run(tier.tier.fetch(items, lambda _index, outcome, _checksum: outcomes.append(outcome), cancelled))
    assert outcomes == [FetchOutcome.FAILED] * 50
    assert not any(map(any, targets))


def test_cancelled_task_returns_only_when_no_target_is_written_any_more(folder: Path) -> None:
    with ValkeyServers(folder=folder / "cancel") as servers, RunningTier(servers.endpoints) as tier:
        keys = [new_key() for _ in range(40)]
        tier.until("connected")
        for key in keys:
            tier.store(key, 64 * KIB)
        servers.pause(0)
        outcomes: list[FetchOutcome] = []

        async def cancel_midway() -> None:
            items = [FetchItem(key, memoryview(bytearray(64 * KIB))) for key in keys]
            never = threading.Event()
            fetch = tier.tier.fetch(items, lambda _index, outcome, _checksum: outcomes.append(outcome), never)
            task = asyncio.create_task(fetch)
            await asyncio.sleep(0.05)
            task.cancel()
            servers.resume(0)
            with pytest.raises(asyncio.CancelledError):
                await task

        tier.run(cancel_midway())
        assert len(outcomes) == len(keys)


def test_header_is_as_long_as_documented() -> None:
    assert HEADER_BYTES == 96
