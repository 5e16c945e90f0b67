"""What survives when agent or holder end, with real processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvpool_agent.__main__ import main
from kvpool_core import wire
from kvpool_core.slot_table import CHECKSUM_VALID, QUARANTINED, READY, UNVERIFIED
from tests.unit.agent_peer import Engine, Node, chain, payload_of, running_node, wait_for

LEASES = "lease_seconds: 5\nwrite_lease_seconds: 5\n"
FAILURES = "kvpool_agent_checksum_failures_total{where=takeover}"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("n"), extra=LEASES) as running:
        yield running


def _store(engine: Engine, hashes: list[bytes]) -> wire.Reserved:
    reserved = engine.store(1, hashes)
    wait_for(lambda: engine.record(reserved.slots[-1]).flags & CHECKSUM_VALID, "the checksums")
    return reserved


@dataclass(frozen=True)
class Killed:
    """A node whose agent was killed in the midst of everything, and restarted."""

    node: Node
    boot_id: bytes
    engine: Engine
    stored: wire.Reserved
    flipped: list[bytes]
    leased: wire.Verdict
    writing: wire.Reserved
    abandoned: wire.Reserved


STORED = chain(1, 6)


@pytest.fixture(scope="module")
def killed(node: Node) -> Iterator[Killed]:
    engine, pair, dead = Engine(node), Engine(node, "pair", world_size=2), Engine(node, "never comes back")
    boot_id = engine.boot_id
    stored = _store(engine, STORED)
    flipped_hashes = chain(2, 6)
    flipped = engine.store(2, flipped_hashes)
    wait_for(lambda: engine.record(flipped.slots[-1]).flags & CHECKSUM_VALID, "the checksums")
    writing = pair.reserve(1, chain(3, 1))
    abandoned = dead.reserve(1, chain(4, 2))
    leased = engine.prefetch("leased", STORED[:2])
    assert node.agent is not None
    node.agent.stop(signal.SIGKILL)
    engine.write(flipped.slots[3], b"flipped")
    node.start_agent()
    for former in (engine, pair, dead):
        former.close()
    again = Engine(node)
    yield Killed(node, boot_id, again, stored, flipped_hashes, leased, writing, abandoned)
    again.close()


def test_slots_being_written_are_quarantined_until_every_rank_is_back(killed: Killed) -> None:
    pair = Engine(killed.node, "pair", world_size=2)
    slot, generation = killed.writing.slots[0], killed.writing.generations[0]
    state = pair.record(slot).state
    if time.monotonic_ns() < killed.writing.write_until_ns:
        assert state == QUARANTINED
    pair.workers[0].send(wire.Announce(0, [], [], []))
    assert pair.reserve(2, [], rank=0).kinds == b""
    state = pair.record(slot).state
    if time.monotonic_ns() < killed.writing.write_until_ns:
        assert state == QUARANTINED
    pair.workers[1].send(wire.Announce(0, [], [], []))
    wait_for(lambda: pair.record(slot).generation > generation, "the slot's freedom", seconds=2)
    pair.close()


def test_lease_outlives_the_agent(killed: Killed) -> None:
    slot = killed.leased.groups[0].slots[0]
    record = killed.engine.record(slot)
    if time.monotonic_ns() < killed.leased.lease_until_ns:
        assert (record.lease_until_ns, record.state) == (killed.leased.lease_until_ns, READY)
    wait_for(lambda: killed.node.arena()["leases"] == 0, "the lease's end")
    assert killed.engine.record(slot).lease_until_ns == 0


def test_killed_agent_finds_its_blocks_again(killed: Killed) -> None:
    engine = killed.engine
    assert engine.boot_id != killed.boot_id
    verdict = engine.prefetch("r", STORED).groups[0]
    assert verdict.states == bytes([wire.HIT]) * 6
    assert (verdict.slots, verdict.generations) == (killed.stored.slots, killed.stored.generations)
    assert [engine.read(slot) for slot in verdict.slots] == [payload_of(block_hash) for block_hash in STORED]
    assert all(not engine.record(slot).flags & UNVERIFIED for slot in verdict.slots)
    assert killed.node.counter("kvpool_agent_taken_over_blocks_total{fate=kept}") == 12


def test_payload_changed_while_the_agent_was_down_is_found_before_the_first_hit(killed: Killed) -> None:
    states = killed.engine.prefetch("f", killed.flipped).groups[0].states
    assert states == bytes([wire.HIT] * 3 + [wire.MISS] * 3)
    assert killed.node.counter(FAILURES) == 1


def test_slots_of_an_engine_that_never_comes_back_are_free_when_the_write_lease_ends(killed: Killed) -> None:
    wait_for(lambda: killed.node.slots()["quarantined"] == 0, "the end of the write lease")
    record = killed.engine.record(killed.abandoned.slots[1])
    assert record.generation > killed.abandoned.generations[1]


def test_replaced_holder_gets_the_arena_from_the_living_agent_and_gives_it_to_the_next(node: Node) -> None:
    engine = Engine(node)
    hashes = chain(7, 2)
    engine.store(10, hashes)
    wait_for(lambda: engine.hits("warm", hashes) == 2, "the blocks")
    first = node.agent
    assert node.holder is not None
    assert first is not None
    node.holder.stop(signal.SIGKILL)
    wait_for(lambda: engine.hits("without holder", hashes) == 2, "the blocks")
    assert node.is_ready()
    holder = node.start_holder()
    wait_for(lambda: holder.lines("took an arena from a living agent"), "the arena in the holder's hands")
    second = node.start_agent(wait=False)
    wait_for(lambda: second.lines("waiting for the lock"), "the second agent waits for the first to end")
    assert node.get("/readyz")[0] == 503
    assert first.stop() == 0
    assert first.lines("drained")
    engine.close()
    wait_for(node.is_ready, "the second agent's readiness")
    again = Engine(node)
    assert again.hits("r", hashes) == 2
    again.close()


def test_another_capacity_means_a_new_arena(node: Node) -> None:
    assert node.agent is not None
    node.agent.stop()
    node.configure(capacity="80Mi", extra=LEASES)
    node.start_agent()
    assert node.arena()["capacity_bytes"] == 80 << 20
    engine = Engine(node)
    assert engine.hits("r", chain(6, 2)) == 0
    engine.close()


def test_agent_waits_for_its_holder_and_says_so_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    try:
        agent = node.start_agent(wait=False)
        status, body = node.get("/readyz")
        assert status == 503
        assert body.startswith(b"waiting for the holder: ")
        wait_for(lambda: agent.lines("waiting for the holder"), "the log line")
        node.start_holder()
        wait_for(node.is_ready, "readiness")
        assert len(agent.lines("waiting for the holder")) <= 2  # no such file, then perhaps refused
    finally:
        node.stop()


def test_wrong_configuration_ends_the_agent_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = Node(tmp_path, extra="lease_secconds: 5\n")
    assert main(["--config", str(node.config_path)]) == 2
    assert "lease_secconds: unknown key" in capsys.readouterr().err
    node.configure()
    assert main(["--config", str(node.config_path), "--check"]) == 0
