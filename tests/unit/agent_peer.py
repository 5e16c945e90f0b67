"""Real holder and agent processes for tests, and a plain blocking client that speaks their protocol.

Invariant: every process started here is waited for, by its own handle, before its owner ends.
"""

from __future__ import annotations

import http.client
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvpool_core import wire
from kvpool_core.frames import FrameDecoder
from kvpool_core.slot_table import SlotRecord, unpack_record

REPOSITORY = Path(__file__).resolve().parents[2]
TOKEN = "test-token"
DEADLINE_SECONDS = 30.0
PAYLOAD_BYTES = 64 * 1024
LAYOUT = wire.GroupLayout(0, PAYLOAD_BYTES, 16, 0)

_M = TypeVar("_M", bound=wire.Message)
_T = TypeVar("_T")


def wait_for(condition: Callable[[], _T | None], what: str, *, seconds: float = DEADLINE_SECONDS) -> _T:
    """The condition's first true value; AssertionError after the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)


class Process:
    """A product process with its log in a file."""

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        self.log = log
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "agent")}
        with log.open("ab") as sink:
            command = [sys.executable, "-m", module, *arguments]
            self._process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait; its exit status."""
        if self.running:
            self._process.send_signal(number)
        try:
            return self._process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def lines(self, message: str) -> list[dict[str, object]]:
        """Log lines with that message."""
        parsed = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in parsed if line["message"] == message]


class Node:
    """A holder and an agent in one folder."""

    def __init__(self, folder: Path, *, extra: str = "", capacity: str = "64Mi") -> None:
        self.folder = folder
        self.socket_path = folder / "agent.sock"
        self.holder_path = folder / "h.sock"
        self.config_path = folder / "agent.yaml"
        (folder / "token").write_text(TOKEN)
        self.configure(extra=extra, capacity=capacity)
        self.holder: Process | None = None
        self.agent: Process | None = None
        self.port = 0

    def configure(self, *, extra: str = "", capacity: str = "64Mi") -> None:
        """Write the agent's configuration."""
        self.config_path.write_text(
            "pool: {namespace: test, name: unit}\n"
            "node: node-a\n"
            f"socket_folder: {self.folder}\n"
            f"holder_socket: {self.holder_path}\n"
            f"admin: {{port: 0, token_file: {self.folder / 'token'}}}\n"
            f"ram: {{capacity: {capacity}}}\n" + extra
        )

    def start_holder(self) -> Process:
        """Start a holder."""
        self.holder = Process("kvpool_agent.holder", "--socket", str(self.holder_path), log=self.folder / "holder.log")
        return self.holder

    def start_agent(self, *, wait: bool = True) -> Process:
        """Start an agent; by default wait until it is ready."""
        log = self.folder / f"agent-{time.monotonic_ns()}.log"
        self.agent = Process("kvpool_agent", "--config", str(self.config_path), log=log)
        agent = self.agent
        started = wait_for(lambda: agent.lines("admin API"), f"the admin API, see {log}")
        self.port = int(str(started[0]["port"]))
        if wait:
            wait_for(self.is_ready, "readiness")
        return self.agent

    def stop(self) -> None:
        """End both."""
        for process in (self.agent, self.holder):
            if process is not None:
                process.stop(signal.SIGKILL)

    def get(self, path: str, *, token: str = TOKEN, method: str = "GET") -> tuple[int, bytes]:
        """(status, body) of the admin API."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def is_ready(self) -> bool:
        """Whether /readyz says so."""
        return self.get("/readyz")[0] == 200

    def stats(self) -> dict[str, object]:
        """/v1/stats."""
        status, body = self.get("/v1/stats")
        assert status == 200, body
        parsed = json.loads(body)
        assert isinstance(parsed, dict)
        return parsed

    def arena(self) -> dict[str, object]:
        """The arena's part of the stats."""
        arena = self.stats()["arena"]
        assert isinstance(arena, dict)
        return arena

    def slots(self) -> dict[str, int]:
        """Slots in use by state."""
        slots = self.arena()["slots"]
        assert isinstance(slots, dict)
        return slots

    def counter(self, name: str) -> float:
        """A counter, 0 when it was never counted."""
        counters = self.stats()["counters"]
        assert isinstance(counters, dict)
        return float(counters.get(name, 0))


@contextmanager
def running_node(folder: Path, *, extra: str = "", capacity: str = "64Mi") -> Iterator[Node]:
    """A node whose holder and agent are up."""
    node = Node(folder, extra=extra, capacity=capacity)
    try:
        node.start_holder()
        node.start_agent()
        yield node
    finally:
        node.stop()


class EventStream:
    """A reader of /v1/events that applies what it reads."""

    def __init__(self, node: Node) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=DEADLINE_SECONDS)
        self._connection.request("GET", "/v1/events", headers={"Authorization": f"Bearer {TOKEN}"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        self._decoder = FrameDecoder()
        self._blocks: dict[tuple[str, str, bytes, int], set[int]] = {}
        self.engines: dict[str, wire.EngineInfo] = {}
        self.boot_id = b""
        self.seq = 0

    def present(self, scope: tuple[str, str, bytes, int]) -> set[int]:
        """Short hashes present in (tier, engine id, domain, group)."""
        return self._blocks.get(scope, set())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Read on until the condition holds."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}"
            data = self._response.read1(1 << 16)
            assert data, "the stream ended"
            for body in self._decoder.feed(data):
                self._apply(wire.decode_stream_message(body))

    def _apply(self, message: wire.StreamMessage) -> None:
        if isinstance(message, wire.EventsBegin):
            self.boot_id, self.seq = message.boot_id, message.seq
        elif isinstance(message, wire.EventsPart):
            self._add(message.engines, message.blocks)
        elif isinstance(message, wire.EventsDelta):
            assert (message.boot_id, message.seq) == (self.boot_id, self.seq + 1)
            self.seq = message.seq
            for block in message.cleared:
                for scope in [scope for scope in self._blocks if _is_cleared(scope, block)]:
                    del self._blocks[scope]
            for block in message.removed:
                self._blocks.setdefault(_scope_of(block), set()).difference_update(block.hashes)
            self._add(message.engines, message.stored)

    def _add(self, engines: list[wire.EngineInfo], blocks: list[wire.TierBlocks]) -> None:
        self.engines.update({engine.engine_id: engine for engine in engines})
        for block in blocks:
            self._blocks.setdefault(_scope_of(block), set()).update(block.hashes)

    def close(self) -> None:
        """End it."""
        self._response.close()
        self._connection.close()


def _is_cleared(scope: tuple[str, str, bytes, int], block: wire.TierBlocks) -> bool:
    return scope == _scope_of(block) or (scope[0] == block.tier != "gpu" and not block.domain)


def _scope_of(block: wire.TierBlocks) -> tuple[str, str, bytes, int]:
    return block.tier, block.engine_id, block.domain, block.group


class Peer:
    """One engine process's connection."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_SECONDS)
        self.socket.connect(str(path))
        self._decoder = FrameDecoder()
        self._messages: list[wire.AgentMessage] = []
        self._fds: list[int] = []
        self._rid = 0

    def send(self, message: wire.Message) -> None:
        """Send one message."""
        self.socket.sendall(wire.encode(message))

    def next_rid(self) -> int:
        """A fresh request id."""
        self._rid += 1
        return self._rid

    def receive(self, kind: type[_M], *, rid: int | None = None) -> _M:
        """The next message of that kind (and request id); others stay for later calls."""
        while True:
            for index, message in enumerate(self._messages):
                if isinstance(message, kind) and rid in (None, message.rid):
                    del self._messages[index]
                    return message
            self._read()

    def _read(self) -> None:
        data, fds, _flags, _address = socket.recv_fds(self.socket, 1 << 20, 4)
        self._fds += fds
        if not data:
            raise EOFError("the agent closed the connection")
        self._messages += [wire.decode_agent_message(body) for body in self._decoder.feed(data)]

    def is_closed(self) -> bool:
        """Wait until the agent has closed the connection; False when it has not by the deadline."""
        try:
            while True:
                self._read()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return True
        except TimeoutError:
            return False

    def take_fds(self) -> list[int]:
        """Descriptors received; the caller owns them."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        """End the connection."""
        self.socket.close()
        for fd in self.take_fds():
            os.close(fd)


def hello(
    engine_id: str, role: str, rank: int = 0, world_size: int = 1, *, rid: int = 1, versions: tuple[int, int] = (1, 1)
) -> wire.Hello:
    """A greeting as the connector sends it."""
    return wire.Hello(rid, *versions, engine_id, role, rank, world_size, 0, "127.0.0.1:8000", ["tiny"], 16, "seed", "")


class Engine:
    """A scheduler and its workers, connected and registered."""

    def __init__(
        self,
        node: Node,
        engine_id: str = "engine-a",
        *,
        world_size: int = 1,
        layouts: list[wire.GroupLayout] | None = None,
        scheduler_part: bytes = b"s" * 16,
    ) -> None:
        self.node = node
        self.engine_id = engine_id
        self.world_size = world_size
        self.layouts = layouts or [LAYOUT]
        self._payload: mmap.mmap | None = None
        self._table: mmap.mmap | None = None
        self.scheduler = self.connect("scheduler", 0)
        self.workers = [self.connect("worker", rank) for rank in range(world_size)]
        self.scheduler.send(wire.RegisterScheduler(0, scheduler_part, ""))
        for worker in self.workers:
            worker.send(wire.RegisterWorker(0, b"w" * 16, b"", self.layouts))
        self.domain = self.await_domain("known").domain

    def connect(self, role: str, rank: int) -> Peer:
        """Connect one process and map what it is handed."""
        peer = Peer(self.node.socket_path)
        peer.send(hello(self.engine_id, role, rank, self.world_size))
        welcome = peer.receive(wire.Welcome)
        payload_fd, table_fd = peer.take_fds()
        size = os.fstat(table_fd).st_size
        self._payload = mmap.mmap(payload_fd, welcome.capacity_bytes)
        self._table = mmap.mmap(table_fd, size, access=mmap.ACCESS_READ)
        os.close(payload_fd)
        os.close(table_fd)
        self.boot_id = welcome.boot_id
        return peer

    def await_domain(self, state: str) -> wire.Domain:
        """Wait until every process is told of the state."""
        for peer in [self.scheduler, *self.workers]:
            while (domain := peer.receive(wire.Domain)).state != state:
                pass
        return domain

    def record(self, slot: int) -> SlotRecord:
        """A slot's record as engines see it."""
        assert self._table is not None
        return unpack_record(memoryview(self._table), slot)

    def write(self, slot: int, data: bytes) -> None:
        """Fill a slot's payload."""
        assert self._payload is not None
        offset = self.record(slot).payload_offset
        self._payload[offset : offset + len(data)] = data

    def read(self, slot: int) -> bytes:
        """A slot's payload."""
        assert self._payload is not None
        record = self.record(slot)
        return bytes(self._payload[record.payload_offset : record.payload_offset + record.payload_bytes])

    def reserve(self, job: int, hashes: list[bytes], *, rank: int = 0, group: int = 0) -> wire.Reserved:
        """Ask for slots."""
        worker = self.workers[rank]
        rid = worker.next_rid()
        parents = [b"", *hashes]
        keys = [wire.StoreKey(group, block_hash, parents[i], i) for i, block_hash in enumerate(hashes)]
        worker.send(wire.Reserve(rid, job, self.domain, False, keys))
        return worker.receive(wire.Reserved, rid=rid)

    def store(self, job: int, hashes: list[bytes], payload: Callable[[bytes], bytes] | None = None) -> wire.Reserved:
        """Store blocks to the end."""
        reserved = self.reserve(job, hashes)
        for index, block_hash in enumerate(hashes):
            if reserved.kinds[index] == wire.SLOT:
                self.write(reserved.slots[index], (payload or payload_of)(block_hash))
        for worker in self.workers:
            worker.send(wire.Ack(0, job))
        return reserved

    def prefetch(
        self, request: str, hashes: list[bytes], *, local: int = 0, tokens_per_second: float = 0.0
    ) -> wire.Verdict:
        """The final verdict on a request's blocks in group 0."""
        rid = self.scheduler.next_rid()
        groups = [wire.GroupKeys(0, hashes, local)]
        self.scheduler.send(wire.Prefetch(rid, request, self.domain, False, groups, tokens_per_second))
        while not (verdict := self.scheduler.receive(wire.Verdict, rid=rid)).final:
            pass
        return verdict

    def hits(self, request: str, hashes: list[bytes]) -> int:
        """Blocks that a Prefetch finds; its lease is released again."""
        verdict = self.prefetch(request, hashes)
        self.scheduler.send(wire.Release(0, [request]))
        return verdict.groups[0].states.count(wire.HIT)

    def close(self) -> None:
        """End every connection."""
        for peer in [self.scheduler, *self.workers]:
            peer.close()


def payload_of(block_hash: bytes) -> bytes:
    """A payload that belongs to its block and no other."""
    return block_hash * (PAYLOAD_BYTES // len(block_hash))


def chain(seed: int, length: int) -> list[bytes]:
    """Block hashes of a made-up request."""
    return [seed.to_bytes(8, "big") + number.to_bytes(8, "big") + bytes(16) for number in range(1, length + 1)]
