"""Engines and the agent over the real socket, with real holder and agent processes."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool_agent.connection import GUEST_FRAME_BYTES
from kvpool_agent.server import CONNECTIONS_MAX
from kvpool_core import wire
from kvpool_core.block_hash import short_hash
from kvpool_core.slot_table import CHECKSUM_VALID, QUARANTINED, READY, WRITING
from tests.unit.agent_peer import (
    Engine,
    EventStream,
    Node,
    Peer,
    Process,
    chain,
    hello,
    payload_of,
    running_node,
    wait_for,
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("n"), extra="lease_seconds: 1\nwrite_lease_seconds: 2\n") as running:
        yield running


@pytest.fixture
def engine(node: Node, request: pytest.FixtureRequest) -> Iterator[Engine]:
    running = Engine(node, f"engine-{request.node.name}")
    yield running
    running.close()


@pytest.fixture
def pair(node: Node, request: pytest.FixtureRequest) -> Iterator[Engine]:
    running = Engine(node, f"pair-{request.node.name}", world_size=2)
    yield running
    running.close()


def test_stored_blocks_are_found_again_with_their_payload(engine: Engine) -> None:
    hashes = chain(1, 8)
    engine.store(1, hashes)
    wait_for(lambda: engine.hits("warm", hashes) == 8, "the blocks")
    verdict = engine.prefetch("r", hashes)
    assert verdict.groups[0].states == bytes([wire.HIT]) * 8
    assert verdict.groups[0].tiers == bytes([wire.TIER_RAM]) * 8
    for block_hash, slot, generation in zip(
        hashes, verdict.groups[0].slots, verdict.groups[0].generations, strict=True
    ):
        assert engine.read(slot) == payload_of(block_hash)
        record = engine.record(slot)
        assert (record.state, record.generation, record.block_hash) == (READY, generation, block_hash)
        assert record.lease_until_ns == verdict.lease_until_ns
    engine.scheduler.send(wire.Release(0, ["r"]))
    wait_for(lambda: engine.record(verdict.groups[0].slots[0]).lease_until_ns == 0, "the release")
    wait_for(lambda: engine.record(verdict.groups[0].slots[0]).flags & CHECKSUM_VALID, "the checksum")


def test_blocks_of_another_domain_are_never_found(engine: Engine, node: Node) -> None:
    hashes = chain(2, 4)
    engine.store(1, hashes)
    wait_for(lambda: engine.hits("own", hashes) == 4, "the blocks")
    other = Engine(node, "other-weights", scheduler_part=b"t" * 16)
    assert other.domain != engine.domain
    assert other.hits("r", hashes) == 0
    other.close()


def test_prefix_ends_at_the_first_absent_block(engine: Engine) -> None:
    hashes = chain(3, 6)
    engine.store(1, hashes[:3])
    wait_for(lambda: engine.hits("warm", hashes) == 3, "the blocks")
    states = engine.prefetch("r", hashes, local=1).groups[0].states
    assert states == bytes([wire.LOCAL, wire.HIT, wire.HIT, wire.MISS, wire.MISS, wire.MISS])


def test_block_is_readable_only_after_every_rank_acknowledged(pair: Engine) -> None:
    hashes = chain(4, 3)
    first, second = pair.reserve(7, hashes, rank=0), pair.reserve(7, hashes, rank=1)
    assert first == wire.Reserved(second.rid, *[getattr(second, name) for name in second.__struct_fields__[1:]])
    pair.workers[0].send(wire.Ack(0, 7))
    assert pair.reserve(8, [], rank=0).kinds == b""  # the Ack before it was handled
    assert pair.hits("early", hashes) == 0
    assert pair.record(first.slots[0]).state == WRITING
    pair.workers[1].send(wire.Ack(0, 7))
    wait_for(lambda: pair.hits("late", hashes) == 3, "the blocks")


def test_one_rank_aborting_makes_the_blocks_never_readable(pair: Engine, node: Node) -> None:
    hashes = chain(5, 3)
    slots = pair.reserve(7, hashes, rank=0).slots
    pair.workers[1].send(wire.Abort(0, 7))
    wait_for(lambda: pair.record(slots[0]).state == QUARANTINED, "the quarantine: rank 0 may still be copying")
    assert pair.reserve(8, hashes, rank=0).kinds == bytes([wire.SLOT]) * 3
    pair.workers[0].send(wire.Ack(0, 7))
    pair.workers[0].send(wire.Abort(0, 8))
    pair.workers[1].send(wire.Abort(0, 8))
    wait_for(lambda: node.slots()["quarantined"] == 0 and node.slots()["writing"] == 0, "the slots")
    assert pair.hits("r", hashes) == 0


def test_rank_that_comes_late_to_an_aborted_job_is_told_full(pair: Engine) -> None:
    pair.workers[0].send(wire.Abort(0, 9))
    assert pair.reserve(10, [], rank=0).kinds == b""  # the Abort before it was handled
    assert pair.reserve(9, chain(6, 2), rank=1).kinds == bytes([wire.FULL]) * 2


def test_key_being_written_or_present_exists(engine: Engine) -> None:
    hashes = chain(7, 2)
    engine.reserve(1, hashes)
    assert engine.reserve(2, hashes).kinds == bytes([wire.EXISTS]) * 2
    engine.workers[0].send(wire.Abort(0, 1))


def test_client_that_dies_between_reserve_and_ack_leaves_nothing(node: Node) -> None:
    engine = Engine(node, "dies")
    engine.reserve(1, chain(8, 4))
    assert node.slots()["writing"] == 4
    engine.close()
    wait_for(lambda: node.slots()["writing"] == 0, "the quarantine")
    wait_for(lambda: node.slots()["quarantined"] == 0, "the end of the write lease")


def test_reconnected_worker_frees_what_it_was_writing(engine: Engine, node: Node) -> None:
    slots = engine.reserve(1, chain(9, 2)).slots
    generation = engine.record(slots[0]).generation
    engine.workers[0].close()
    engine.workers[0] = engine.connect("worker", 0)
    engine.workers[0].send(wire.Announce(0, [], [], []))
    wait_for(lambda: engine.record(slots[0]).generation > generation, "the slot's freedom", seconds=1.5)


def test_lease_ends_by_time(engine: Engine, node: Node) -> None:
    hashes = chain(10, 2)
    engine.store(1, hashes)
    wait_for(lambda: engine.hits("warm", hashes) == 2, "the blocks")
    slot = engine.prefetch("forgotten", hashes).groups[0].slots[0]
    assert engine.record(slot).lease_until_ns > 0
    wait_for(lambda: engine.record(slot).lease_until_ns == 0, "the lease's end")


def test_announced_leases_are_renewed_and_others_end(engine: Engine) -> None:
    hashes = chain(11, 2)
    engine.store(1, hashes)
    wait_for(lambda: engine.hits("warm", hashes) == 2, "the blocks")
    kept = engine.prefetch("kept", hashes[:1]).groups[0]
    other = engine.prefetch("other", hashes).groups[0]
    engine.scheduler.close()
    engine.scheduler = engine.connect("scheduler", 0)
    engine.scheduler.send(wire.Announce(0, ["kept"], kept.slots, kept.generations))
    wait_for(lambda: engine.record(other.slots[1]).lease_until_ns == 0, "the other lease's end")
    assert engine.record(kept.slots[0]).lease_until_ns > 0


def test_domain_is_refused_when_ranks_disagree(node: Node) -> None:
    pair = Engine(node, "disagree", world_size=2)
    pair.workers[1].send(wire.RegisterWorker(0, b"x" * 16, b"", pair.layouts))
    assert "encodings" in pair.await_domain("refused").reason
    assert pair.hits("r", chain(12, 1)) == 0
    assert pair.reserve(1, chain(12, 1)).kinds == bytes([wire.FULL])
    pair.close()


def test_engine_that_cannot_be_identified_gets_no_hits(node: Node) -> None:
    engine = Engine(node, "unidentified")
    engine.scheduler.send(wire.RegisterScheduler(0, b"", "the weights are streamed"))
    assert "streamed" in engine.await_domain("refused").reason
    engine.close()


def test_lookup_by_file_version_returns_what_was_taught(engine: Engine) -> None:
    files = [wire.FileKey(1, 2, 3, 4, b"sample"), wire.FileKey(1, 3, 3, 4, b"sample")]
    engine.scheduler.send(wire.FileDigests(50, files[:1], [b"d" * 16]))
    engine.scheduler.receive(wire.FileDigests, rid=50)
    engine.workers[0].send(wire.FileDigests(51, files, []))
    assert engine.workers[0].receive(wire.FileDigests, rid=51).digests == [b"d" * 16, b""]


def test_leases_of_an_engine_end_at_its_share_of_the_arena_and_the_rest_is_a_miss(engine: Engine) -> None:
    hashes = chain(50, 300)  # 16 MiB, a quarter of the arena, are 256 blocks
    engine.store(1, hashes)
    assert engine.reserve(2, []).kinds == b""  # the Ack before it was handled
    verdict = engine.prefetch("first", hashes).groups[0]
    assert verdict.states == bytes([wire.HIT] * 256 + [wire.MISS] * 44)
    again = engine.prefetch("shares the leased prefix", hashes[:256]).groups[0]
    assert again.states == bytes([wire.HIT]) * 256
    assert engine.prefetch("more", hashes[:257]).groups[0].states[-1] == wire.MISS
    engine.scheduler.send(wire.Release(0, ["first", "shares the leased prefix", "more"]))


def test_hybrid_model_needs_of_a_windowed_group_only_the_window(node: Node) -> None:
    layouts = [wire.GroupLayout(0, 64 << 10, 16, 0), wire.GroupLayout(1, 32 << 10, 16, 2)]
    engine = Engine(node, "hybrid", layouts=layouts)
    full, window = chain(51, 6), chain(52, 6)
    worker = engine.workers[0]
    keys = [wire.StoreKey(0, block_hash, b"", number) for number, block_hash in enumerate(full)]
    keys += [wire.StoreKey(1, window[number], b"", number) for number in (0, 1, 2, 3, 5)]
    worker.send(wire.Reserve(1, 1, engine.domain, False, keys))
    assert worker.receive(wire.Reserved).kinds == bytes([wire.SLOT]) * 11
    worker.send(wire.Ack(0, 1))
    assert engine.reserve(2, []).kinds == b""
    groups = [wire.GroupKeys(0, full, 1), wire.GroupKeys(1, window, 0)]
    engine.scheduler.send(wire.Prefetch(7, "r", engine.domain, False, groups, 0.0))
    verdict = engine.scheduler.receive(wire.Verdict, rid=7)
    hit, miss, local = wire.HIT, wire.MISS, wire.LOCAL
    assert verdict.final
    assert list(verdict.groups[0].states) == [local, hit, hit, hit, miss, miss]  # the window before 5 and 6 has a hole
    assert list(verdict.groups[1].states) == [miss, miss, hit, hit, miss, miss]
    engine.close()


def test_event_stream_tells_engines_arena_and_gpu(engine: Engine, node: Node) -> None:
    hashes = chain(53, 3)
    stream = EventStream(node)
    engine.scheduler.send(wire.GpuEvents(0, "ssr", [0, 0, 0], [1, 2, 1]))
    engine.store(1, hashes)
    gpu, ram = ("gpu", engine.engine_id, b"", 0), ("ram", "", engine.domain, 0)
    stream.until(lambda: stream.present(gpu) == {2}, "the GPU's block")
    stream.until(lambda: stream.present(ram) >= {short_hash(value) for value in hashes}, "the arena's blocks")
    late = EventStream(node)
    late.until(lambda: late.present(gpu) == {2} and late.present(ram) == stream.present(ram), "the snapshot")
    assert late.engines[engine.engine_id].domain == engine.domain
    assert late.boot_id == engine.boot_id
    engine.scheduler.close()
    stream.until(lambda: not stream.present(gpu) and not stream.engines[engine.engine_id].connected, "the GPU's end")
    engine.scheduler = engine.connect("scheduler", 0)
    stream.close()
    late.close()


# --- peers that misbehave ---------------------------------------------------------------------------------------------


def _spoil(node: Node, data: bytes) -> Peer:
    peer = Peer(node.socket_path)
    peer.socket.sendall(data)
    return peer


def _greeted(node: Node, role: str, name: str) -> Peer:
    peer = Peer(node.socket_path)
    peer.send(hello(name, role))
    peer.receive(wire.Welcome)
    return peer


def _frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


BAD_DOMAIN = wire.Reserve(1, 1, b"short", False, [])
BAD_HASH = wire.Reserve(1, 1, b"d" * 16, False, [wire.StoreKey(0, b"short", b"", 0)])
BAD_GROUP = wire.Reserve(1, 1, b"d" * 16, False, [wire.StoreKey(9, b"h" * 32, b"", 0)])
TOO_MANY = wire.Reserve(
    1, 1, b"d" * 16, False, [wire.StoreKey(0, n.to_bytes(32, "big"), b"", 0) for n in range(65_537)]
)
TWICE = wire.Reserve(1, 1, b"d" * 16, False, [wire.StoreKey(0, b"h" * 32, b"", 0)] * 2)


@pytest.mark.parametrize("message", [BAD_DOMAIN, BAD_HASH, BAD_GROUP, TOO_MANY, TWICE])
def test_impossible_keys_close_the_connection(engine: Engine, node: Node, message: wire.Reserve) -> None:
    before = node.counter("kvpool_agent_protocol_errors_total{reason=wrong_keys}")
    engine.workers[0].send(message)
    assert engine.workers[0].is_closed()
    assert node.counter("kvpool_agent_protocol_errors_total{reason=wrong_keys}") == before + 1


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        ("garbage", _frame(b"\xff\xfe garbage")),
        ("garbage", _frame(b"")),
        ("frame_too_long", struct.pack("<I", (16 << 20) + 1)),
        ("frame_too_long", struct.pack("<I", GUEST_FRAME_BYTES + 1)),
        ("hello_missing", wire.encode(wire.Ack(0, 1))),
        ("hello_invalid", wire.encode(hello("", "worker"))),
        ("hello_invalid", wire.encode(hello("e", "spectator"))),
        ("hello_invalid", wire.encode(hello("e", "worker", 3, 2))),
    ],
)
def test_bad_first_bytes_close_only_that_connection(engine: Engine, node: Node, reason: str, data: bytes) -> None:
    name = f"kvpool_agent_protocol_errors_total{{reason={reason}}}"
    before = node.counter(name)
    peer = _spoil(node, data)
    assert peer.is_closed()
    peer.close()
    assert node.counter(name) == before + 1
    assert engine.hits("unharmed", chain(20, 1)) == 0


def test_truncated_frame_is_counted_and_logged_once(node: Node) -> None:
    name = "kvpool_agent_protocol_errors_total{reason=truncated}"
    before = node.counter(name)
    assert node.agent is not None
    logged = len(node.agent.lines("closed a connection"))
    _spoil(node, struct.pack("<I", 100) + b"x").close()
    wait_for(lambda: node.counter(name) == before + 1, "the count")
    assert len(node.agent.lines("closed a connection")) == logged + 1


def test_peer_without_a_common_version_is_refused(node: Node) -> None:
    peer = Peer(node.socket_path)
    peer.send(hello("future", "worker", versions=(7, 9)))
    refused = peer.receive(wire.Refused)
    assert refused.code == "UnsupportedProtocol"
    assert peer.is_closed()
    peer.close()


def test_messages_of_the_other_role_or_before_the_domain_close_the_connection(node: Node) -> None:
    cases: list[tuple[str, wire.Message, str]] = [
        ("worker", wire.Prefetch(1, "r", b"d" * 16, False, [], 0.0), "wrong_role"),
        ("scheduler", wire.Ack(0, 1), "wrong_role"),
        ("worker", wire.Reserve(1, 1, b"d" * 16, False, []), "wrong_state"),
        ("scheduler", hello("again", "scheduler"), "wrong_state"),
    ]
    for role, message, reason in cases:
        name = f"kvpool_agent_protocol_errors_total{{reason={reason}}}"
        before = node.counter(name)
        peer = _greeted(node, role, f"alone-{reason}-{role}")
        peer.send(message)
        assert peer.is_closed(), reason
        peer.close()
        assert node.counter(name) == before + 1


def test_rank_that_reserves_other_keys_for_a_job_is_closed(pair: Engine) -> None:
    pair.reserve(1, chain(30, 2), rank=0)
    with pytest.raises(EOFError):
        pair.reserve(1, chain(31, 2), rank=1)


def test_client_that_does_not_read_is_dropped(node: Node) -> None:
    engine = Engine(node, "deaf")
    before = node.counter("kvpool_agent_protocol_errors_total{reason=slow_reader}")
    files = [wire.FileKey(1, number, 3, 4, b"s" * 64) for number in range(10_000)]
    message = wire.encode(wire.FileDigests(1, files, []))
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        for _ in range(200):
            engine.scheduler.socket.sendall(message)
    assert node.counter("kvpool_agent_protocol_errors_total{reason=slow_reader}") == before + 1
    engine.close()


def test_connections_that_end_with_their_welcome_take_no_place(engine: Engine, node: Node) -> None:
    for _ in range(CONNECTIONS_MAX // 64):
        refused = [Peer(node.socket_path) for _ in range(64)]
        for peer in refused:
            peer.send(hello(engine.engine_id, "worker", 1, 2))
        for peer in refused:
            assert peer.receive(wire.Refused).code == "EngineMismatch"
            assert peer.is_closed()
            peer.close()
    welcome = Peer(node.socket_path)
    welcome.send(hello("patient", "scheduler"))
    assert welcome.receive(wire.Welcome).capacity_bytes == 64 << 20
    welcome.close()


def descriptors(process: Process) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir()}


def test_connections_beyond_the_limit_are_turned_away_with_one_line_until_there_is_room(node: Node) -> None:
    agent = node.agent
    assert agent is not None
    crowd: list[Peer] = []
    while len(crowd) < CONNECTIONS_MAX:  # in portions that the listener's backlog holds
        crowd.extend(Peer(node.socket_path) for _ in range(64))
        wait_for(lambda: len(descriptors(agent)) > 2 * len(crowd), "them to be accepted, each with its process")
    late = [Peer(node.socket_path) for _ in range(3)]
    for peer in late:
        assert peer.is_closed()
    assert [line["reason"] for line in agent.lines("turning connections away")] == ["there are 512 connections already"]
    assert node.counter("kvpool_agent_protocol_errors_total{reason=too_many_connections}") == len(late)
    for peer in (*crowd, *late):
        peer.close()
    wait_for(lambda: len(descriptors(agent)) < CONNECTIONS_MAX, "the crowd to be gone")
    crowd[0] = Peer(node.socket_path)
    crowd[0].send(hello("after the crowd", "scheduler"))
    crowd[0].receive(wire.Welcome)
    crowd[0].close()
    assert [line["turned_away"] for line in agent.lines("taking connections again")] == [len(late)]


def test_agent_without_descriptors_says_so_once_and_goes_on(node: Node) -> None:
    agent = node.agent
    assert agent is not None
    said = len(agent.lines("turning connections away"))
    before = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
    lowest_free = min(set(range(before[1])) - descriptors(agent))
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    waiting = Peer(node.socket_path)
    waiting.send(hello("patient", "scheduler"))
    told = wait_for(lambda: agent.lines("turning connections away")[said:], "the line")
    assert [line["reason"] for line in told] == ["could not accept a connection: Too many open files"]
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, before)
    waiting.receive(wire.Welcome)
    waiting.close()


def test_another_world_size_for_the_same_engine_is_refused(engine: Engine, node: Node) -> None:
    peer = Peer(node.socket_path)
    peer.send(hello(engine.engine_id, "worker", 1, 2))
    assert peer.receive(wire.Refused).code == "EngineMismatch"
    peer.close()


# --- admin ------------------------------------------------------------------------------------------------------------


def test_admin_api_wants_the_token_but_for_health_and_metrics(node: Node) -> None:
    for path in ("/v1/stats", "/v1/events"):
        assert node.get(path, token="wrong")[0] == 401
    assert node.get("/v1/drain", token="wrong", method="POST")[0] == 401
    for path in ("/healthz", "/readyz", "/metrics"):
        assert node.get(path, token="wrong")[0] == 200
    metrics = node.get("/metrics")[1].decode()
    assert 'kvpool_agent_slots{state="ready"}' in metrics
    assert "kvpool_agent_arena_bytes 6.7108864e+07" in metrics


def test_log_lines_name_pool_namespace_and_node(node: Node) -> None:
    assert node.agent is not None
    line = node.agent.lines("serving")[0]
    assert (line["namespace"], line["pool"], line["node"]) == ("test", "unit", "node-a")
