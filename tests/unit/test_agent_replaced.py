"""A new agent pod beside engines that still map the former one's arena: real holders, agents and the connector's own link."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool_agent.arena_room import MARGIN_BYTES, LastArena, Situation, needed_bytes, read_available_bytes, why_pending
from kvpool_agent.arena_status import Mapper
from kvpool_agent.pod_identity import PodIdentity
from kvpool_core import wire
from kvpool_vllm import worker_link
from kvpool_vllm.worker_link import WorkerLink
from tests.unit.agent_peer import LAYOUT, Engine, Node, Peer, hello, running_node, wait_for


class RecordingCopier:
    """Stands for a device's driver: knows what is registered with it."""

    def __init__(self) -> None:
        self.registered: list[int] = []

    def register(self, address: int, size: int) -> list[int]:  # noqa: ARG002
        self.registered.append(address)
        return [address]

    def unregister(self, registered: list[int]) -> None:
        while registered:
            self.registered.remove(registered.pop())


class Worker:
    """A worker process's link, with the copy threads' way of touching the arena."""

    def __init__(self, node: Node, engine_id: str = "engine-a") -> None:
        self.copier = RecordingCopier()
        registration = wire.RegisterWorker(0, b"w" * 16, b"", [LAYOUT])
        self.link = WorkerLink(
            str(node.socket_path),
            lambda: hello(engine_id, "worker", versions=(wire.PROTOCOL_OLDEST, wire.PROTOCOL_VERSION)),
            registration,
            self.copier,  # type: ignore[arg-type]  # marks and copies are the worker's business
            rank=0,
        )
        self.link.client.start()

    @property
    def arena_id(self) -> bytes:
        arena = self.link.arena
        return arena.arena_id if arena is not None else b""

    def close(self) -> None:
        self.link.close()
        self.link.on_absent(worker_link.ABANDON_SECONDS)


def mappings(arena: str = "kvpool-payload") -> int:
    """Arenas that this process maps."""
    return sum(arena in line for line in Path("/proc/self/maps").read_text().splitlines())


def replace_pod(node: Node, *, wait: bool = True) -> None:
    """The agent's pod goes, with its holder; another comes."""
    assert node.agent is not None
    assert node.holder is not None
    node.agent.stop(signal.SIGKILL)
    node.holder.stop(signal.SIGKILL)
    node.start_holder()
    node.start_agent(wait=wait)


def arena_of(node: Node) -> dict[str, object]:
    """The arena's part of the stats."""
    return node.arena()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("n")
    with running_node(folder) as running:
        assert running.agent is not None
        assert not running.agent.lines("ArenaPending"), "the first agent of a folder waits for nobody"
        assert LastArena(folder).read().hex() == arena_of(running)["arena_id"]
        yield running


@pytest.fixture
def worker(node: Node) -> Iterator[Worker]:
    connected = Worker(node)
    wait_for(lambda: connected.link.connected and connected.copier.registered, "the arena")
    yield connected
    connected.close()


def test_arena_is_pending_while_a_copy_is_in_flight_and_names_who_holds_it(node: Node, worker: Worker) -> None:
    former = worker.arena_id
    view = worker.link.arena
    assert view is not None
    with worker.link.load_lock:  # as a copy thread while it reads
        replace_pod(node, wait=False)
        held = wait_for(lambda: arena_of(node)["held_by"], "the agent to know who maps the former arena")
        assert held == [{"engine_id": "engine-a", "role": "worker", "rank": 0, "pod": None}]
        assert arena_of(node)["reason"] == "ArenaPending"
        status, body = node.get("/readyz")
        assert (status, node.get("/healthz")[0]) == (503, 200)
        assert b"ArenaPending: engines to unmap the former arena: worker 0 of engine engine-a" in body
        assert worker.copier.registered == [view.address], "neither unregistered nor unmapped under a copy"
        assert mappings() == 1
        time.sleep(3.0)  # longer than one standby period: it goes on waiting
        assert arena_of(node)["state"] == "pending"
        assert arena_of(node)["prefaulted_bytes"] == 0
    wait_for(lambda: worker.link.connected and worker.arena_id not in (b"", former), "the new arena")
    assert arena_of(node)["held_by"] == []


def test_agent_waits_for_engines_that_have_not_connected_yet(node: Node) -> None:
    engine = Engine(node)
    engine.close()
    replace_pod(node, wait=False)
    started = time.monotonic()
    wait_for(lambda: arena_of(node)["state"] == "pending", "the arena to be pending")
    assert "may map the former arena to connect" in str(arena_of(node)["waiting_for"])
    late = Peer(node.socket_path)
    mapped = wire.Hello(7, 1, 2, "late", "worker", 0, 1, 0, "", ["m"], 16, "", "", arena_id=b"f" * 16)
    late.send(mapped)
    assert late.receive(wire.Standby).unmap
    old = Peer(node.socket_path)  # one of the last release cannot wait
    old.send(hello("old", "worker"))
    assert old.receive(wire.Refused).code == "ArenaPending"
    assert old.is_closed()
    old.close()
    time.sleep(max(0.0, started + 6.0 - time.monotonic()))  # beyond the time for connecting
    assert arena_of(node)["state"] == "pending"
    late.send(wire.Unmapped(0))
    assert late.receive(wire.Welcome, rid=7).capacity_bytes == 64 << 20
    old = Peer(node.socket_path)
    old.send(hello("old", "worker"))
    assert old.receive(wire.Welcome).protocol == 1
    for peer in (late, old):
        peer.close()


def test_restarted_agent_of_the_same_pod_has_nobody_unmap(node: Node, worker: Worker) -> None:
    arena_id, view = worker.arena_id, worker.link.arena
    assert node.agent is not None
    node.agent.stop(signal.SIGKILL)
    wait_for(lambda: not worker.link.connected, "the loss")
    node.start_agent()
    wait_for(lambda: worker.link.connected, "the connection")
    assert (worker.arena_id, worker.link.arena) == (arena_id, view)
    assert node.agent is not None
    assert not node.agent.lines("ArenaPending")


def test_engine_that_is_not_let_in_any_more_unmaps(node: Node, worker: Worker) -> None:
    worker.link.on_refused(wire.Refused(0, "AuthenticationUnavailable", ""))
    assert mappings() == 1
    worker.link.on_refused(wire.Refused(0, "NamespaceNotAllowed", ""))
    assert (worker.link.arena, worker.copier.registered, mappings()) == (None, [], 0)


def test_arena_of_an_agent_that_does_not_come_back_is_unmapped(node: Node, worker: Worker) -> None:
    worker.link.on_absent(worker_link.ABANDON_SECONDS - 1)
    assert mappings() == 1
    worker.link.on_absent(worker_link.ABANDON_SECONDS)
    assert (worker.link.arena, mappings()) == (None, 0)


def test_engine_maps_the_new_arena_and_its_copies_never_meet_unmapped_memory(node: Node, worker: Worker) -> None:
    """Readers as the copy threads are, without a pause, while pods are replaced: an access to unmapped memory ends the run."""
    end, reads = threading.Event(), [0, 0]

    def read(lock: threading.Lock, number: int) -> None:
        while not end.is_set():
            with lock:
                arena = worker.link.arena
                if arena is not None:
                    ctypes.string_at(arena.address + ((reads[number] % 64) << 20), 1 << 16)
                    reads[number] += 1

    locks = (worker.link.store_lock, worker.link.load_lock)
    threads = [threading.Thread(target=read, args=(lock, number)) for number, lock in enumerate(locks)]
    for thread in threads:
        thread.start()
    try:
        former = worker.arena_id
        replace_pod(node)
        wait_for(lambda: worker.link.connected and worker.arena_id not in (b"", former), "the new arena")
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert min(reads) > 0
    wait_for(lambda: len(worker.copier.registered) == 1, "the registration")
    assert mappings() == 1
    assert arena_of(node)["arena_id"] == worker.arena_id.hex()


# --- whether there is room --------------------------------------------------------------------------------------------

MAPPER = Mapper("engine-a", "worker", 1, PodIdentity("chat", "llama-0", "u"))


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        (Situation([MAPPER], 0, 1, 2), "unmap the former arena: worker 1 of engine engine-a of pod chat/llama-0"),
        (Situation([], 2.5, 1, 2), "may map the former arena to connect"),
        (Situation([], 0, 1000, 999), "needs 1000 bytes with its margin, the node has 999 available"),
        (Situation([], -1, 1000, 1000), ""),
        (Situation([], 0, 1000, None), ""),
    ],
)
def test_reason_for_waiting(situation: Situation, reason: str) -> None:
    found = why_pending(situation)
    assert reason in found
    assert bool(reason) == bool(found)


def test_memory_that_the_holder_frees_counts() -> None:
    assert needed_bytes(1 << 30, 0, kept_bytes=0) == (1 << 30) + MARGIN_BYTES
    assert needed_bytes(1 << 30, 0, kept_bytes=1 << 30) == MARGIN_BYTES
    assert needed_bytes(1 << 30, 2 << 20, kept_bytes=2 << 30) == 0


def test_available_memory_is_read_where_the_kernel_says_it(tmp_path: Path) -> None:
    assert (read_available_bytes(0) or 0) > 0
    assert read_available_bytes(0, root=tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9 kB\nMemAvailable:   2048 kB\n")
    assert read_available_bytes(0, root=tmp_path) == 2 << 20
    pages = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    pages.mkdir(parents=True)
    (pages / "free_hugepages").write_text("5\n")
    (pages / "resv_hugepages").write_text("1\n")
    assert read_available_bytes(2 << 20, root=tmp_path) == 8 << 20
    assert read_available_bytes(1 << 30, root=tmp_path) is None


def test_last_arena_is_remembered_and_a_damaged_note_counts_as_one(tmp_path: Path) -> None:
    last = LastArena(tmp_path)
    assert last.read() == b""
    last.write(b"\x01" * 16)
    assert last.read() == b"\x01" * 16
    (tmp_path / "last-arena").write_text("not hex")
    assert last.read()


def test_pod_with_too_little_memory_says_how_much(tmp_path: Path) -> None:
    node = Node(tmp_path, capacity="16Ti")
    try:
        node.start_holder()
        node.start_agent(wait=False)
        arena = wait_for(lambda: arena_of(node) if arena_of(node)["state"] == "pending" else None, "ArenaPending")
        assert f"needs {(16 << 40) + MARGIN_BYTES} bytes" in str(arena["waiting_for"])
        assert node.agent is not None
        assert node.agent.stop() == 0, "it can be ended meanwhile"
    finally:
        node.stop()
