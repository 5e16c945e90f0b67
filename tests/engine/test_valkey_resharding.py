"""A cluster whose slots are being moved: whatever lies where, good blocks are found and stay, and no shard is blamed."""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from kvpool_agent.valkey_keys import part_name, slot_of
from kvpool_agent.valkey_tier import BlockKey, FetchOutcome
from kvpool_agent.valkey_topology import ClusterTopology, node_info
from tests.harness.running_tier import KIB, PREFIX, RunningTier, eventually, key_on, payload_of, reader
from tests.harness.valkey_cluster import ValkeyServers

pytestmark = pytest.mark.engine

SIZE = 64 * KIB
"""Two parts."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    with ValkeyServers(folder=tmp_path_factory.mktemp("v") / "cluster", shards=2, cluster=True) as running:
        yield running


@pytest.fixture
def tier(servers: ValkeyServers) -> Iterator[RunningTier]:
    with RunningTier(servers.endpoints) as running:
        yield running.until("connected")


@dataclass(frozen=True)
class Move:
    """The move of one block's slot from shard 0 to shard 1, in steps."""

    servers: ValkeyServers
    key: BlockKey

    def run(self, shard: int, *command: str | int | bytes) -> object:
        """One command to one node."""
        with closing(self.servers.client(shard)) as client:
            return client.execute_command(*command)

    def _node_id(self, shard: int) -> str:
        answer = self.run(shard, "CLUSTER", "MYID")
        assert isinstance(answer, bytes)
        return answer.decode()

    def begin(self) -> None:
        """Declare it on both nodes."""
        slot = slot_of(self.key)
        self.run(1, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._node_id(0))
        self.run(0, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._node_id(1))

    def take(self, part: int) -> None:
        """Move one part's value."""
        name = part_name(PREFIX, self.key, part)
        assert self.run(0, "MIGRATE", "127.0.0.1", self.servers.ports[1], name, 0, 5000) == b"OK"

    def finish(self) -> None:
        """The slot is the other shard's."""
        for shard in (1, 0):
            self.run(shard, "CLUSTER", "SETSLOT", slot_of(self.key), "NODE", self._node_id(1))


def names(key: BlockKey) -> list[bytes]:
    return [part_name(PREFIX, key, part) for part in (0, 1)]


def assert_unharmed(tier: RunningTier) -> None:
    """Nothing was taken for damaged, nothing deleted, nobody blamed."""
    assert tier.tier.stats()["bad_values"] == {}
    for result in ("ok", "failed"):
        assert tier.metric("kvpool_valkey_operations_total", op="unlink", result=result) == 0
    assert tier.tier.stats()["breakers"] == dict.fromkeys(tier.settings.endpoints, "closed")
    assert tier.state() == "connected"


@pytest.mark.parametrize("moved", [[], [1], [0], [0, 1]], ids=["none", "second", "first", "both"])
def test_block_in_a_slot_that_moves_is_found_wherever_its_parts_are(
    servers: ValkeyServers, tier: RunningTier, moved: list[int]
) -> None:
    others = [key_on(servers, 0) for _ in range(6)]
    keys = [*others[:3], key_on(servers, 0), *others[3:]]
    payloads = [tier.store(key, SIZE) for key in keys]
    move = Move(servers, keys[3])
    move.begin()
    for part in moved:
        move.take(part)
    for _ in range(5):  # one failure more than opens a breaker
        assert tier.exists(*keys) == [True] * len(keys)
        assert [got.payload for got in tier.fetch_all([(key, SIZE) for key in keys])] == payloads
    stored = tier.write(keys[3], payloads[3])
    assert stored is not None
    assert stored.wait(10)
    assert_unharmed(tier)
    for part in {0, 1} - set(moved):
        move.take(part)
    move.finish()
    assert tier.fetch(keys[3], SIZE).payload == payloads[3]
    assert_unharmed(tier)
    assert reader(servers, 1).exists(names(keys[3])[0]) == 1


def test_new_block_of_a_slot_that_moves_is_stored_and_an_absent_one_is_missed(
    servers: ValkeyServers, tier: RunningTier
) -> None:
    key = key_on(servers, 0)
    move = Move(servers, key)
    move.begin()
    assert tier.exists(key) == [False]
    assert tier.fetch(key, SIZE).outcome is FetchOutcome.MISS
    payload = tier.store(key, SIZE)
    assert tier.fetch(key, SIZE).payload == payload
    assert_unharmed(tier)
    move.finish()


def test_slot_that_nobody_answers_for_is_a_miss_that_is_counted_and_nothing_else(
    servers: ValkeyServers, tier: RunningTier
) -> None:
    key, other = key_on(servers, 0), key_on(servers, 0)
    payload = tier.store(key, SIZE)
    tier.store(other, SIZE)
    move = Move(servers, key)
    move.begin()
    move.take(1)
    move.run(1, "CLUSTER", "SETSLOT", slot_of(key), "STABLE")  # the source sends there, the target back
    for _ in range(5):
        assert tier.fetch(key, SIZE).outcome is FetchOutcome.FAILED
        assert tier.exists(key, other) == [False, True]
    assert tier.write(key, payload_of(key, SIZE)) is not None
    eventually(lambda: tier.tier.stats()["write_queue_items"] == 0)
    assert tier.metric("kvpool_valkey_failures_total", reason="resharding") >= 10
    assert ("removed", key) not in tier.hints
    assert_unharmed(tier)
    move.begin()
    move.take(0)
    move.finish()
    assert tier.fetch(key, SIZE).payload == payload


def test_node_that_a_slot_moved_to_and_that_hangs_is_blamed_and_not_the_one_that_sends_there(
    servers: ValkeyServers,
) -> None:
    key, other = key_on(servers, 0), key_on(servers, 0)
    with RunningTier(servers.endpoints, breaker_open_seconds=30.0, base_timeout_seconds=0.3) as tier:
        tier.until("connected")
        payload = tier.store(other, SIZE)
        move = Move(servers, key)
        move.begin()
        move.finish()  # the tier has not heard of it
        servers.pause(1)
        try:
            assert tier.fetch(key, SIZE).outcome is FetchOutcome.FAILED
            assert tier.fetch(other, SIZE).payload == payload
            first, second = tier.settings.endpoints
            assert tier.tier.stats()["breakers"] == {first: "closed", second: "open: timeout"}
        finally:
            servers.resume(1)


def test_topology_is_asked_for_on_connections_that_have_been_idle(servers: ValkeyServers) -> None:
    with RunningTier(servers.endpoints, base_timeout_seconds=0.2) as tier:
        tier.until("connected")
        topology = ClusterTopology(tier.settings)
        for shard in topology.shards():
            pool = topology.pool(shard)
            assert pool is not None
            node_info(pool, b"server", deadline=time.monotonic() + 0.2)
        time.sleep(0.3)  # beyond the deadline of what was asked before
        topology.refresh(lambda _shard: True)
        topology.close()
