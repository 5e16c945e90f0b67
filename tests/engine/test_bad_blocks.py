"""Flipped bytes, in Valkey and in the arena: misses, counted, removed; the answer is the engine's own."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import pytest
import redis

from kvpool_core import slot_table
from kvpool_core.block_hash import block_hashes
from tests.engine.answers import Loads, reference_pair, whole_blocks
from tests.engine.conftest import fresh_prompt, settle
from tests.harness.engine import Engine
from tests.harness.engine_client import BLOCK_SIZE, Answer, metric_sum
from tests.harness.node import Node
from tests.harness.stack import Stack


def hashes_of(engine: Engine, prompt: str) -> list[bytes]:
    """Block hashes of a prompt, from the engine's own tokens."""
    return list(block_hashes(engine.tokenize(prompt), block_size=BLOCK_SIZE))


def with_prefix(reference: Engine, prompt: str, blocks: int) -> Answer:
    """The reference's answer when its own cache holds exactly the first `blocks` blocks."""
    reference.reset_own_cache()
    reference.complete(prompt[: blocks * BLOCK_SIZE + 1], max_tokens=1)
    return reference.complete(prompt)


def valkey_keys(fleet: Stack, node: Node, block_hash: bytes) -> tuple[redis.RedisCluster, list[bytes]]:
    """An independent client and the keys of one block."""
    host, port = fleet.valkey.endpoints[0].split(":")
    client = redis.RedisCluster(host=host, port=int(port))
    (domain,) = {engine["domain"] for engine in node.stats()["engines"] if engine["state"] == "known"} or {""}
    return client, [f"kvpool:local/demo:{domain}:0:{{{block_hash.hex()}}}".encode()]


def deletions_seen(client: redis.RedisCluster) -> int:
    """UNLINKs that the servers themselves counted: one for each part that a block may have."""
    stats = client.info("commandstats", target_nodes=redis.RedisCluster.PRIMARIES)
    return sum(shard.get("cmdstat_unlink", {}).get("calls", 0) for shard in stats.values())


def deleted_blocks(node: Node) -> float:
    return metric_sum(node.metrics(), "kvpool_valkey_operations_total", op="unlink", result="ok")


@pytest.mark.parametrize("block", [0, 7])
def test_flipped_byte_in_valkey_is_a_miss_counted_and_deleted(fleet: Stack, reference: Engine, block: int) -> None:
    (a, b), prompt = fleet.engines, fresh_prompt()
    a.complete(prompt)
    settle(fleet.nodes[0])
    client, (key,) = valkey_keys(fleet, fleet.nodes[1], hashes_of(a, prompt)[block])
    stored = client.get(key)
    assert isinstance(stored, bytes)
    value = bytearray(stored)
    assert len(value) > 1000, "the block's value is there"
    value[-100] ^= 0x40
    client.set(key, bytes(value))
    bad = metric_sum(fleet.nodes[1].metrics(), "kvpool_valkey_bad_values_total")
    loads, deletions, deleted = Loads(b), deletions_seen(client), deleted_blocks(fleet.nodes[1])
    assert b.complete(prompt) == with_prefix(reference, prompt, block)
    assert loads.by_tier() == {"ram": 0, "valkey": block * BLOCK_SIZE}
    assert metric_sum(fleet.nodes[1].metrics(), "kvpool_valkey_bad_values_total") == bad + 1
    settle(fleet.nodes[1])
    assert deletions_seen(client) > deletions
    assert deleted_blocks(fleet.nodes[1]) == deleted + 1
    healed = client.get(key)  # deleted by the reader, then written anew from what the engine computed
    assert healed != bytes(value)
    client.close()


def test_byte_flipped_in_the_arena_while_the_agent_is_down_is_found_before_the_first_hit(
    fleet: Stack, reference: Engine
) -> None:
    a, node, prompt = fleet.engines[0], fleet.nodes[0], fresh_prompt()
    expected = reference_pair(reference, prompt)
    a.complete(prompt)
    settle(node)
    first = hashes_of(a, prompt)[0]
    node.agent.kill()
    try:
        flip_in_arena(node, first)
    finally:
        node.agent.start()
        node.wait_ready()
    a.wait_identified()
    a.reset_own_cache()
    loads = Loads(a)
    answer = a.complete(prompt)
    assert metric_sum(node.metrics(), "kvpool_agent_checksum_failures_total", where="takeover") == 1
    # the good copy of the first block came from Valkey, or, if fetching was not worth it, the prompt was computed
    by_tier = loads.by_tier()
    assert answer == (expected.cached if by_tier["ram"] + by_tier["valkey"] == whole_blocks(prompt) else expected.cold)
    # a lookup that was given up and asked again finds in the arena what was fetched for it
    assert by_tier["ram"] < whole_blocks(prompt) or fetched_blocks(node) > 0


def fetched_blocks(node: Node) -> float:
    """Blocks that came from Valkey since the agent's start."""
    return metric_sum(node.metrics(), "kvpool_agent_fetched_blocks_total", outcome="ok")


def flip_in_arena(node: Node, block_hash: bytes) -> None:
    """Flip one byte of a block's payload behind everybody's back, through the holder's descriptors."""
    payload, table = memfds(node.holder.pid)
    with table.open("rb") as stream:
        view = memoryview(mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ))
        header = slot_table.unpack_header(view)
        assert header is not None
        records = (slot_table.unpack_record(view, slot) for slot in range(header.records))
        record = next(r for r in records if r.state == slot_table.READY and r.block_hash == block_hash)
    with payload.open("r+b") as memory, mmap.mmap(memory.fileno(), header.capacity_bytes) as arena:
        arena[record.payload_offset + record.payload_bytes // 2] ^= 0x01


def memfds(pid: int) -> tuple[Path, Path]:
    """The holder's payload and table, told apart by size."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the connection to the killed agent
            if "memfd:" in str(path.readlink()):
                found[path] = path.stat().st_blocks
    payload, *_, table = sorted(found, key=lambda path: found[path], reverse=True)
    return payload, table
