"""Two agents and a real three-shard Valkey: what one node stores, the other loads, and never anything else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpool_core import wire
from kvpool_core.slot_table import CHECKSUM_VALID
from tests.harness.valkey_cluster import ValkeyServers
from tests.unit.agent_peer import Engine, Node, chain, payload_of, running_node, wait_for

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Nodes:
    """Two nodes on one Valkey cluster, an engine of the same model on each."""

    servers: ValkeyServers
    first: Node
    second: Node
    storing: Engine
    loading: Engine


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("v")
    with ValkeyServers(folder=folder / "valkey", shards=3, cluster=True) as servers:
        endpoints = json.dumps(servers.endpoints)
        valkey = f"valkey: {{endpoints: {endpoints}, breaker_open_seconds: 0.5, base_timeout_seconds: 0.5}}\n"
        with (
            running_node(_made(folder / "a"), extra=valkey) as first,
            running_node(_made(folder / "b"), extra=valkey) as second,
        ):
            for node in (first, second):
                wait_for(lambda node=node: _valkey(node)["state"] == "connected", "the Valkey tier")  # type: ignore[misc]
            storing, loading = Engine(first, "storing"), Engine(second, "loading")
            assert storing.domain == loading.domain
            yield Nodes(servers, first, second, storing, loading)
            storing.close()
            loading.close()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _valkey(node: Node) -> dict[str, Any]:
    valkey = node.stats()["valkey"]
    assert isinstance(valkey, dict)
    return valkey


def _keys(nodes: Nodes, block_hash: bytes) -> list[tuple[int, bytes]]:
    """(shard, name) of the values that hold a block."""
    found = []
    for shard in range(3):
        with closing(nodes.servers.client(shard)) as client:
            names = client.keys(f"*{block_hash.hex()}*")
        assert isinstance(names, list)
        found += [(shard, name) for name in names]
    return found


def _store(nodes: Nodes, job: int, hashes: list[bytes]) -> None:
    nodes.storing.store(job, hashes)
    wait_for(lambda: all(_keys(nodes, block_hash) for block_hash in hashes), "the values in Valkey")


def test_blocks_stored_on_one_node_are_loaded_on_the_other(nodes: Nodes) -> None:
    hashes = chain(101, 40)
    _store(nodes, 1, hashes)
    verdict = nodes.loading.prefetch("r", hashes).groups[0]
    assert verdict.states == bytes([wire.HIT]) * 40
    assert verdict.tiers == bytes([wire.TIER_VALKEY]) * 40
    assert [nodes.loading.read(slot) for slot in verdict.slots] == [payload_of(block_hash) for block_hash in hashes]
    assert all(nodes.loading.record(slot).flags & CHECKSUM_VALID for slot in verdict.slots)
    again = nodes.loading.prefetch("again", hashes).groups[0]
    assert (again.tiers, again.slots) == (bytes([wire.TIER_RAM]) * 40, verdict.slots)
    nodes.loading.scheduler.send(wire.Release(0, ["r", "again"]))
    wait_for(lambda: nodes.second.arena()["leases"] == 0, "the releases")


def test_first_verdict_says_pending_and_comes_at_once(nodes: Nodes) -> None:
    hashes = chain(102, 20)
    _store(nodes, 2, hashes)
    scheduler = nodes.loading.scheduler
    rid = scheduler.next_rid()
    scheduler.send(wire.Prefetch(rid, "p", nodes.loading.domain, False, [wire.GroupKeys(0, hashes, 2)], 0.0))
    first = scheduler.receive(wire.Verdict, rid=rid)
    assert not first.final
    assert first.groups[0].states == bytes([wire.LOCAL] * 2 + [wire.PENDING] * 18)
    last = scheduler.receive(wire.Verdict, rid=rid)
    assert last.final
    assert last.groups[0].states == bytes([wire.LOCAL] * 2 + [wire.HIT] * 18)
    scheduler.send(wire.Release(0, ["p"]))


def test_prefix_ends_where_valkey_has_nothing(nodes: Nodes) -> None:
    hashes = chain(103, 10)
    _store(nodes, 3, hashes[:6])
    states = nodes.loading.prefetch("r3", hashes).groups[0].states
    assert states == bytes([wire.HIT] * 6 + [wire.MISS] * 4)


def test_fetch_that_recomputing_beats_is_not_begun(nodes: Nodes) -> None:
    hashes = chain(104, 10)
    _store(nodes, 4, hashes)
    states = nodes.loading.prefetch("r4", hashes, tokens_per_second=1e9).groups[0].states
    assert states == bytes([wire.MISS]) * 10
    assert nodes.second.counter("kvpool_agent_fetches_declined_total{when=before_asking}") >= 1
    assert nodes.loading.hits("slow engine", hashes) == 10


def test_private_blocks_never_leave_the_node(nodes: Nodes) -> None:
    hashes = chain(105, 3)
    worker = nodes.storing.workers[0]
    keys = [wire.StoreKey(0, block_hash, b"", position) for position, block_hash in enumerate(hashes)]
    worker.send(wire.Reserve(9, 5, b"private-domain--", True, keys))
    slots = worker.receive(wire.Reserved, rid=9).slots
    worker.send(wire.Ack(0, 5))
    wait_for(lambda: nodes.storing.record(slots[2]).flags & CHECKSUM_VALID, "the checksums")
    _store(nodes, 6, chain(106, 1))  # a later write has gone through
    assert not any(_keys(nodes, block_hash) for block_hash in hashes)


def test_flipped_byte_in_valkey_is_a_miss_and_deleted(nodes: Nodes) -> None:
    hashes = chain(107, 5)
    _store(nodes, 7, hashes)
    shard, name = min(_keys(nodes, hashes[2]))  # part 0 of two
    with closing(nodes.servers.client(shard)) as client:
        client.setrange(name, 5_000, b"flipped")
        states = nodes.loading.prefetch("r7", hashes).groups[0].states
        assert states == bytes([wire.HIT] * 2 + [wire.MISS] * 3)
        wait_for(lambda: not client.exists(name), "the deletion")
    assert nodes.second.slots()["writing"] == 0


def test_hanging_valkey_costs_a_tenth_of_recomputing(nodes: Nodes) -> None:
    hashes = chain(108, 40)
    _store(nodes, 8, hashes)
    try:
        for shard in range(3):
            nodes.servers.pause(shard)
        started = time.monotonic()
        verdict = nodes.loading.prefetch("r8", hashes, tokens_per_second=640.0)  # one second to recompute
        assert time.monotonic() - started < 0.5
        assert verdict.groups[0].states == bytes([wire.MISS]) * 40
        own = chain(109, 10)
        nodes.storing.store(9, own)
        wait_for(lambda: nodes.storing.hits("own", own) == 10, "RAM hits while Valkey hangs")
    finally:
        for shard in range(3):
            nodes.servers.resume(shard)
    wait_for(lambda: nodes.second.slots()["writing"] == 0, "no slot left in writing")
    wait_for(lambda: nodes.loading.hits("back", hashes) == 40, "Valkey hits again", seconds=15)


def test_two_requests_for_the_same_blocks_share_one_fetch(nodes: Nodes) -> None:
    hashes = chain(110, 30)
    _store(nodes, 10, hashes)
    before = nodes.second.counter("kvpool_agent_fetched_blocks_total{outcome=ok}")
    scheduler = nodes.loading.scheduler
    groups = [wire.GroupKeys(0, hashes, 0)]
    for number in (1, 2):
        scheduler.send(wire.Prefetch(9000 + number, f"s{number}", nodes.loading.domain, False, groups, 0.0))
    for number in (1, 2):
        while not (verdict := scheduler.receive(wire.Verdict, rid=9000 + number)).final:
            pass
        assert verdict.groups[0].states == bytes([wire.HIT]) * 30
    assert nodes.second.counter("kvpool_agent_fetched_blocks_total{outcome=ok}") == before + 30
    scheduler.send(wire.Release(0, ["s1", "s2"]))


def test_drain_writes_what_is_queued_and_takes_nothing_more(nodes: Nodes) -> None:
    hashes = chain(111, 20)
    nodes.storing.store(11, hashes)
    wait_for(lambda: nodes.storing.hits("stored", hashes) == 20, "the blocks")
    status, body = nodes.first.get("/v1/drain?timeout_seconds=20", method="POST")
    assert (status, json.loads(body)) == (200, {"drained": True})
    assert all(_keys(nodes, block_hash) for block_hash in hashes)
    assert nodes.first.get("/readyz") == (503, b"draining\n")
    assert nodes.storing.reserve(12, chain(112, 1)).kinds == bytes([wire.FULL])
