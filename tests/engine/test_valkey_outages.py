"""The Valkey tier when Valkey refuses, hangs, dies, is full or moves: bounded in time, one log line a change, recovery."""

# redis-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool_agent.valkey_keys import part_name, slot_of
from kvpool_agent.valkey_tier import BlockKey, FetchOutcome
from kvpool_agent.valkey_value import part_sizes
from tests.harness.running_tier import (
    BASE_TIMEOUT_SECONDS,
    KIB,
    PREFIX,
    RECOVERY_SECONDS,
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


# ----------------------------------------------------------------------------------------------------------- password


def test_right_password_wrong_password_and_its_correction(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvpool_agent")
    file = tmp_path / "password"
    file.write_text("wrong secret\n")
    with (
        ValkeyServers(folder=folder / "auth", shards=3, cluster=True, password="right secret") as servers,
        RunningTier(servers.endpoints, password_file=str(file)) as tier,
    ):
        tier.until("unauthenticated")
        assert not tier.tier.available(new_key())
        assert tier.write(new_key(), b"x") is None
        assert tier.exists(new_key()) == [False]
        assert tier.fetch(new_key(), 10).outcome is FetchOutcome.FAILED
        file.write_text("right secret\n")
        tier.until("connected")
        key = new_key()
        tier.store(key, 100)
        assert tier.fetch(key, 100).outcome is FetchOutcome.OK
    assert "secret" not in caplog.text
    assert caplog.text.count("valkey state=unauthenticated") == 1
    assert caplog.text.count("valkey state=connected") == 1


def test_missing_password_file_and_no_password_are_unauthenticated(folder: Path, tmp_path: Path) -> None:
    with ValkeyServers(folder=folder / "auth1", password="secret") as servers:
        with RunningTier(servers.endpoints, password_file=str(tmp_path / "absent")) as tier:
            tier.until("unauthenticated")
        with RunningTier(servers.endpoints) as tier:
            tier.until("unauthenticated")


def test_acl_user_with_password_is_used(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("pw")
    with ValkeyServers(folder=folder / "acl") as servers:
        reader(servers).execute_command("ACL", "SETUSER", "agent", "on", ">pw", "~kvpool:*", "+@all")
        reader(servers).execute_command("ACL", "SETUSER", "default", "off")
        with RunningTier(servers.endpoints, username="agent", password_file=str(file)) as tier:
            key = new_key()
            tier.until("connected").store(key, 100)
            assert tier.fetch(key, 100).outcome is FetchOutcome.OK


# ----------------------------------------------------------------------------------------------------- lost and hanging


def open_lines(caplog: pytest.LogCaptureFixture, state: str) -> int:
    return sum(f"breaker={state}" in record.getMessage() for record in caplog.records)


def test_hanging_shard_is_left_alone_and_comes_back(
    cluster_tier: RunningTier, cluster: ValkeyServers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvpool_agent")
    tier, keys = cluster_tier, [key_on(cluster, shard) for shard in range(3)]
    for key in keys:
        tier.store(key, 64 * KIB)
    cluster.pause(1)
    try:
        ticks = tier.ticks
        got = tier.fetch_all([(key, 64 * KIB) for key in keys * 20])
        assert tier.ticks > ticks + 10
        assert all(result.seconds < 2 * BASE_TIMEOUT_SECONDS + 3 for result in got)
        assert {got[i].outcome for i in range(len(got)) if i % 3 == 1} == {FetchOutcome.FAILED}
        assert {got[i].outcome for i in range(len(got)) if i % 3 != 1} == {FetchOutcome.OK}
        assert [tier.tier.available(key) for key in keys] == [True, False, True]
        assert tier.state() == "degraded"
        shard = cluster.endpoints[1]
        assert tier.metric("kvpool_valkey_breaker_open", shard=shard) == 1
        started = time.monotonic()
        assert tier.exists(*keys) == [True, False, True]
        assert tier.fetch(keys[1], 64 * KIB).outcome is FetchOutcome.FAILED
        assert tier.write(keys[1], b"x") is None
        tier.store(key_on(cluster, 0), 64 * KIB)
        assert time.monotonic() - started < 2.5 * BASE_TIMEOUT_SECONDS
    finally:
        cluster.resume(1)
    tier.until("connected", RECOVERY_SECONDS)
    assert tier.fetch(keys[1], 64 * KIB).outcome is FetchOutcome.OK
    assert tier.metric("kvpool_valkey_breaker_open", shard=shard) == 0
    assert ("cleared", None) not in tier.hints
    assert (open_lines(caplog, "open"), open_lines(caplog, "closed")) == (1, 1)


def test_existence_is_unknown_after_the_callers_timeout(folder: Path) -> None:
    with (
        ValkeyServers(folder=folder / "slow2") as servers,
        RunningTier(servers.endpoints, base_timeout_seconds=10.0) as tier,
    ):
        tier.until("connected").store(key := new_key(), 100)
        servers.pause(0)
        try:
            started = time.monotonic()
            assert tier.exists(key, seconds=0.05) == [False]
            assert time.monotonic() - started < 5.0
        finally:
            servers.resume(0)
        assert ("removed", key) not in tier.hints


def test_idle_tier_notices_a_hanging_server(folder: Path) -> None:
    with ValkeyServers(folder=folder / "idle") as servers, RunningTier(servers.endpoints) as tier:
        tier.until("connected")
        servers.pause(0)
        try:
            tier.until("unreachable", RECOVERY_SECONDS)
        finally:
            servers.resume(0)
        tier.until("connected", RECOVERY_SECONDS)


def test_killed_shard_comes_back_empty_and_its_hints_are_dropped(
    cluster_tier: RunningTier, cluster: ValkeyServers
) -> None:
    tier, keys = cluster_tier, [key_on(cluster, shard) for shard in range(3)]
    for key in keys:
        tier.store(key, 64 * KIB)
    cluster.kill(2)
    got = tier.fetch_all([(key, 64 * KIB) for key in keys * 4])
    assert {got[i].outcome for i in range(len(got)) if i % 3 == 2} == {FetchOutcome.FAILED}
    assert {got[i].outcome for i in range(len(got)) if i % 3 != 2} == {FetchOutcome.OK}
    cluster.restart(2)
    tier.until("connected", RECOVERY_SECONDS)
    eventually(lambda: ("cleared", None) in tier.hints)
    assert tier.fetch(keys[2], 64 * KIB).outcome is FetchOutcome.MISS
    tier.store(keys[2], 64 * KIB)
    assert tier.fetch(keys[2], 64 * KIB).outcome is FetchOutcome.OK
    assert tier.hints.count(("cleared", None)) == 1


def test_server_that_was_replaced_while_nobody_asked_clears_the_hints(folder: Path) -> None:
    with ValkeyServers(folder=folder / "replaced") as servers, RunningTier(servers.endpoints) as tier:
        tier.until("connected").store(new_key(), 100)
        eventually(lambda: tier.metric("kvpool_valkey_operation_seconds_count", op="probe") >= 1)
        servers.restart(0)
        eventually(lambda: ("cleared", None) in tier.hints, RECOVERY_SECONDS)


def test_server_that_starts_after_the_agent_is_found(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpool_agent")
    servers = ValkeyServers(folder=folder / "late")
    with RunningTier(servers.endpoints) as tier:
        tier.until("unreachable")
        assert tier.write(new_key(), b"x") is None
        assert tier.fetch(new_key(), 10).outcome is FetchOutcome.FAILED
        with servers:
            tier.until("connected", RECOVERY_SECONDS).store(new_key(), 100)
    assert caplog.text.count("valkey state=unreachable") == 1


def test_shard_that_hangs_when_the_agent_starts_costs_only_its_blocks(cluster: ValkeyServers) -> None:
    cluster.pause(0)
    try:
        with RunningTier(cluster.endpoints) as tier:
            eventually(lambda: tier.state() in ("connected", "degraded"))
            key = key_on(cluster, 1)
            tier.store(key, 100)
            assert tier.fetch(key, 100).outcome is FetchOutcome.OK
            tier.until("degraded")
            cluster.resume(0)
            tier.until("connected", RECOVERY_SECONDS)
            tier.store(key_on(cluster, 0), 100)
    finally:
        cluster.resume(0)


def test_stop_ends_soon_although_a_shard_hangs(folder: Path) -> None:
    with ValkeyServers(folder=folder / "stop") as servers:
        with RunningTier(servers.endpoints) as tier:
            tier.until("connected")
            servers.pause(0)
            writes = [tier.write(key, payload_of(key, 64 * KIB)) for key in (new_key() for _ in range(20))]
            assert any(writes)
            started = time.monotonic()
            tier.stop(0.2)
            assert time.monotonic() - started < 8 * BASE_TIMEOUT_SECONDS
        servers.resume(0)


# --------------------------------------------------------------------------------------------------- full and read-only


def test_full_server_takes_no_writes_but_reads(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpool_agent")
    with (
        ValkeyServers(folder=folder / "full", maxmemory_policy="noeviction") as servers,
        RunningTier(servers.endpoints) as tier,
    ):
        tier.until("connected").store(early := new_key(), 64 * KIB)
        reader(servers).config_set("maxmemory", 1)
        for _ in range(60):
            tier.write(key := new_key(), payload_of(key, 64 * KIB))
        eventually(lambda: tier.metric("kvpool_valkey_failures_total", reason="full") >= 3)
        assert tier.fetch(early, 64 * KIB).outcome is FetchOutcome.OK
        assert tier.state() == "connected"
        assert caplog.text.count("writes=refused reason=full") == 1
        eventually(lambda: tier.metric("kvpool_valkey_writes_dropped_total", reason="refused") > 0)
        reader(servers).config_set("maxmemory", "64mb")
        eventually(lambda: is_stored(tier, new_key()), RECOVERY_SECONDS)
        assert caplog.text.count("writes=accepted") == 1


def is_stored(tier: RunningTier, key: BlockKey) -> bool:
    stored = tier.write(key, payload_of(key, 10_000))
    return stored is not None and stored.wait(0.5)


def test_replica_is_read_but_not_written(folder: Path, standalone: ValkeyServers, tier: RunningTier) -> None:
    tier.store(key := new_key(), 64 * KIB)
    with ValkeyServers(folder=folder / "replica") as replica:
        reader(replica).execute_command("REPLICAOF", "127.0.0.1", standalone.ports[0])
        eventually(lambda: reader(replica).exists(part_name(PREFIX, key, 0)) == 1)
        with RunningTier(replica.endpoints) as on_replica:
            on_replica.until("connected")
            assert on_replica.fetch(key, 64 * KIB).outcome is FetchOutcome.OK
            for _ in range(5):
                on_replica.write(new_key(), b"x")
            reason = "read_only_replica"
            eventually(lambda: on_replica.metric("kvpool_valkey_failures_total", reason=reason) >= 1)
            assert on_replica.fetch(key, 64 * KIB).outcome is FetchOutcome.OK
        with RunningTier([*replica.endpoints, *standalone.endpoints]) as on_both:  # the primary is preferred
            on_both.until("connected").store(new_key(), 100)


# ------------------------------------------------------------------------------------------------------------ topology


def test_topology_that_is_not_there_is_reported_and_raises_nothing(standalone: ValkeyServers) -> None:
    with RunningTier(standalone.endpoints, topology="Cluster") as tier:
        tier.until("unreachable")
        assert tier.exists(new_key()) == [False]


def test_moved_slot_is_followed(folder: Path) -> None:
    with (
        ValkeyServers(folder=folder / "moved", shards=2, cluster=True) as servers,
        RunningTier(servers.endpoints) as tier,
    ):
        key = key_on(servers, 0)
        tier.until("connected")
        give_slot(servers, slot_of(key))
        payload = tier.store(key, 64 * KIB)
        assert tier.fetch(key, 64 * KIB).payload == payload
        assert tier.exists(key) == [True]
        assert reader(servers, 1).exists(part_name(PREFIX, key, 0)) == 1


def give_slot(servers: ValkeyServers, slot: int) -> None:
    """Make shard 1 the owner of an empty slot of shard 0."""
    clients = [reader(servers, shard) for shard in range(2)]
    target = clients[1].execute_command("CLUSTER MYID").decode()
    for client in reversed(clients):
        client.execute_command("CLUSTER SETSLOT", slot, "NODE", target)


def test_slot_under_migration_is_asked_for_at_its_target(folder: Path) -> None:
    with (
        ValkeyServers(folder=folder / "ask", shards=2, cluster=True) as servers,
        RunningTier(servers.endpoints) as tier,
    ):
        key = key_on(servers, 0)
        tier.until("connected")
        source, target = (reader(servers, shard).execute_command("CLUSTER MYID").decode() for shard in range(2))
        reader(servers, 1).execute_command("CLUSTER SETSLOT", slot_of(key), "IMPORTING", source)
        reader(servers, 0).execute_command("CLUSTER SETSLOT", slot_of(key), "MIGRATING", target)
        payload = tier.store(key, 64 * KIB)
        assert tier.fetch(key, 64 * KIB).payload == payload
        assert tier.tier.stats()["state"] == "connected"
        assert reader(servers, 1).execute_command("CLUSTER COUNTKEYSINSLOT", slot_of(key)) == len(part_sizes(64 * KIB))


def test_cluster_without_majority_is_read_but_not_written(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpool_agent")
    with (
        ValkeyServers(folder=folder / "majority", shards=3, cluster=True, node_timeout_ms=1000) as servers,
        RunningTier(servers.endpoints) as tier,
    ):
        tier.until("connected")
        payload = tier.store(key := key_on(servers, 0), 64 * KIB)
        servers.kill(1)
        servers.kill(2)
        eventually(lambda: reader(servers).execute_command("CLUSTER INFO")["cluster_state"] == "fail")
        eventually(lambda: not is_stored(tier, key_on(servers, 0)))
        for _ in range(10):
            tier.write(other := key_on(servers, 0), payload_of(other, 100))
            assert tier.fetch(key, 64 * KIB).payload == payload
        eventually(lambda: "writes=refused reason=cluster_down" in caplog.text)
        assert tier.tier.available(key)
        servers.restart(1)
        servers.restart(2)
        tier.until("connected", RECOVERY_SECONDS)
        eventually(lambda: is_stored(tier, key_on(servers, 0)), RECOVERY_SECONDS)
