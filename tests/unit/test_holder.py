"""The holder process against good and bad agents."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool_agent.fd_socket import FrameReader, close_fds, send_frame
from kvpool_agent.memfd import create_payload, create_table, seal_payload
from kvpool_core import wire
from tests.unit.agent_peer import Process, wait_for

CAPACITY = 8 << 20
ARENA_ID = b"a" * 16


class Agent:
    """A scripted agent."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        self.socket.connect(str(path))
        self._reader = FrameReader(self.socket)
        self._bodies: list[bytes] = []

    def ask(self, message: wire.Message, fds: tuple[int, ...] = ()) -> wire.HolderMessage:
        send_frame(self.socket, wire.encode(message), fds)
        return self.receive()

    def receive(self) -> wire.HolderMessage:
        while not self._bodies:
            bodies = self._reader.read()
            if bodies is None:
                raise EOFError
            self._bodies = bodies
        return wire.decode_holder_message(self._bodies.pop(0))

    def take_fds(self) -> list[int]:
        return self._reader.take_fds()

    def close(self) -> None:
        self._reader.close()
        self.socket.close()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    socket_path = tmp_path / "h.sock"
    holder = Process("kvpool_agent.holder", "--socket", str(socket_path), log=tmp_path / "log")
    wait_for(lambda: holder.lines("serving"), "the holder")
    yield socket_path
    assert holder.stop() == 0


@pytest.fixture
def agent(path: Path) -> Iterator[Agent]:
    scripted = Agent(path)
    yield scripted
    scripted.close()


def _create(agent: Agent) -> wire.HolderState:
    """Have an arena made; the final state."""
    state = agent.ask(wire.HolderCreate(1, CAPACITY, 0))
    while isinstance(state, wire.HolderState) and state.prefaulted_bytes < CAPACITY:
        state = agent.receive()
    assert isinstance(state, wire.HolderState), state
    return state


def test_created_arena_is_whole_sealed_and_kept_for_the_next_agent(agent: Agent, path: Path) -> None:
    state = _create(agent)
    (fd,) = agent.take_fds()
    assert os.fstat(fd).st_blocks * 512 >= CAPACITY
    with pytest.raises(PermissionError):
        os.ftruncate(fd, CAPACITY // 2)
    with mmap.mmap(fd, CAPACITY) as mapping:
        mapping[100:105] = b"hello"
    agent.close()
    successor = Agent(path)
    assert successor.ask(wire.HolderHello(2, b"b" * 16)) == wire.HolderState(2, *_fields(state))
    (again,) = successor.take_fds()
    with mmap.mmap(again, CAPACITY) as mapping:
        assert mapping[100:105] == b"hello"
    close_fds([fd, again])
    successor.close()


def _fields(state: wire.HolderState) -> tuple[bytes, int, int, int, bool]:
    return state.arena_id, state.capacity_bytes, state.huge_page_bytes, state.prefaulted_bytes, state.has_table


def test_latest_table_is_passed_on(agent: Agent, path: Path) -> None:
    state = _create(agent)
    close_fds(agent.take_fds())
    for text in (b"first", b"second"):
        table = create_table(4096)
        os.pwrite(table, text, 0)
        seal_payload(table)
        kept = agent.ask(wire.HolderKeep(1, state.arena_id, CAPACITY, 0, False), (table,))
        assert isinstance(kept, wire.HolderState)
        assert kept.has_table
        close_fds([table, *agent.take_fds()])
    successor = Agent(path)
    successor.ask(wire.HolderHello(1, b"b" * 16))
    payload, table = successor.take_fds()
    assert os.pread(table, 6, 0) == b"second"
    close_fds([payload, table])
    successor.close()


def test_empty_holder_takes_an_arena_from_a_living_agent(agent: Agent) -> None:
    payload, table = create_payload(CAPACITY, 0), create_table(4096)
    seal_payload(payload)
    seal_payload(table)
    state = agent.ask(wire.HolderKeep(1, ARENA_ID, CAPACITY, 0, True), (payload, table))
    assert state == wire.HolderState(1, ARENA_ID, CAPACITY, 0, CAPACITY, True)
    close_fds(agent.take_fds())
    close_fds([payload, table])


@pytest.mark.parametrize("fault", ["unsealed", "size", "count", "kind"])
def test_descriptors_that_are_not_an_arena_are_refused(agent: Agent, fault: str) -> None:
    payload, table = create_payload(CAPACITY if fault != "size" else CAPACITY * 2, 0), create_table(4096)
    if fault != "unsealed":
        seal_payload(payload)
    seal_payload(table)
    pipe = os.pipe()
    fds = {"count": (table,), "kind": (pipe[0], table)}.get(fault, (payload, table))
    refused = agent.ask(wire.HolderKeep(1, ARENA_ID, CAPACITY, 0, True), fds)
    assert isinstance(refused, wire.Refused)
    assert agent.ask(wire.HolderHello(2, b"b" * 16)) == wire.HolderState(2, b"", 0, 0, 0, False)
    close_fds([payload, table, *pipe])


def test_other_arena_is_not_taken_while_one_is_kept(agent: Agent) -> None:
    _create(agent)
    close_fds(agent.take_fds())
    table = create_table(4096)
    seal_payload(table)
    assert isinstance(agent.ask(wire.HolderKeep(1, ARENA_ID, CAPACITY, 0, False), (table,)), wire.Refused)
    os.close(table)


@pytest.mark.parametrize("capacity", [0, -1, 1 << 60])
def test_impossible_capacity_is_refused(agent: Agent, capacity: int) -> None:
    assert isinstance(agent.ask(wire.HolderCreate(1, capacity, 0)), wire.Refused)


def test_huge_pages_that_the_node_lacks_are_refused_with_a_hint(agent: Agent) -> None:
    answer = agent.ask(wire.HolderCreate(1, 1 << 40, 1 << 30))
    while isinstance(answer, wire.HolderState):
        answer = agent.receive()
    assert isinstance(answer, wire.Refused)
    assert "huge pages" in answer.message


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 64, struct.pack("<I", 1 << 31), struct.pack("<I", 5) + b"xxxxx", struct.pack("<I", 50)]
)
def test_garbage_and_death_at_any_moment_leave_the_arena_alone(agent: Agent, path: Path, garbage: bytes) -> None:
    state = _create(agent)
    close_fds(agent.take_fds())
    bad = Agent(path)
    bad.socket.sendall(garbage)
    bad.close()
    after = agent.ask(wire.HolderHello(5, b"b" * 16))
    close_fds(agent.take_fds())
    assert after == wire.HolderState(5, *_fields(state))


def test_peer_that_floods_descriptors_is_dropped(agent: Agent, path: Path) -> None:
    bad = Agent(path)
    read_end, write_end = os.pipe()
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        for _ in range(1000):
            socket.send_fds(bad.socket, [b"\x01"], [read_end] * 4)
    close_fds([read_end, write_end])
    bad.close()
    assert agent.ask(wire.HolderHello(5, b"b" * 16)) == wire.HolderState(5, b"", 0, 0, 0, False)


def test_agent_that_dies_while_the_arena_is_made_does_not_stop_it(path: Path) -> None:
    dying = Agent(path)
    send_frame(dying.socket, wire.encode(wire.HolderCreate(1, CAPACITY, 0)))
    dying.close()
    successor = Agent(path)

    def complete() -> bool:
        state = successor.ask(wire.HolderHello(2, b"b" * 16))
        close_fds(successor.take_fds())
        return isinstance(state, wire.HolderState) and state.prefaulted_bytes == CAPACITY

    wait_for(complete, "the arena")
    successor.close()
