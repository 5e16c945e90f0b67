"""A scripted peer of the agent's protocol: stores what it is given, and lies where a test says so.

For faults that a correct agent cannot be made to show. Its arena is real, its table is real, its answers follow `Script`.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvpool_core import identity, slot_table, wire
from kvpool_core.frames import FrameDecoder

CAPACITY_BYTES = 64 << 20
SLOT_BYTES = 256 << 10
LEASE_SECONDS = 30.0


@dataclass(slots=True)
class Script:
    """What to do wrong. `lie_about_generation`: verdicts name a generation that the table does not have."""

    lie_about_generation: bool = False


class ScriptedAgent:
    """Serves one engine of one worker at `path` until closed."""

    def __init__(self, path: Path) -> None:
        self.script = Script()
        self.verdicts_sent = 0
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._arena_id, self._boot_id = os.urandom(16), os.urandom(16)
        self._payload_fd = os.memfd_create("scripted-payload")
        os.ftruncate(self._payload_fd, CAPACITY_BYTES)
        self._slots = CAPACITY_BYTES // SLOT_BYTES
        self._table_fd = os.memfd_create("scripted-table")
        os.ftruncate(self._table_fd, slot_table.table_bytes(self._slots))
        self._table = memoryview(mmap.mmap(self._table_fd, slot_table.table_bytes(self._slots)))
        header = slot_table.TableHeader(self._arena_id, self._boot_id, self._slots, CAPACITY_BYTES)
        slot_table.pack_header(self._table, header)
        self._known: dict[tuple[int, bytes], int] = {}
        self._jobs: dict[int, list[tuple[tuple[int, bytes], int]]] = {}
        self._layouts: dict[int, wire.GroupLayout] = {}
        self._parts: dict[str, bytes] = {}
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End it; connections are lost."""
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        os.close(self._payload_fd)
        os.close(self._table_fd)
        self._path.unlink(missing_ok=True)

    @property
    def is_known(self) -> bool:
        """Whether scheduler and worker have registered."""
        return len(self._parts) == 2

    @property
    def stored_blocks(self) -> int:
        """Blocks that are readable."""
        with self._lock:
            return len(self._known)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        decoder = FrameDecoder()
        with connection, suppress(OSError):
            while data := connection.recv(1 << 16):
                for body in decoder.feed(data):
                    with self._lock:
                        self._answer(connection, wire.decode_engine_message(body))

    def _answer(self, connection: socket.socket, message: wire.EngineMessage) -> None:
        match message:
            case wire.Hello():
                welcome = wire.Welcome(
                    message.rid, wire.PROTOCOL_VERSION, self._boot_id, self._arena_id, CAPACITY_BYTES, LEASE_SECONDS
                )
                socket.send_fds(connection, [wire.encode(welcome)], [self._payload_fd, self._table_fd])
            case wire.RegisterScheduler():
                self._parts["scheduler"] = message.part
                self._say_domain()
            case wire.RegisterWorker():
                self._parts["worker"] = message.shared_part
                self._layouts = {layout.group: layout for layout in message.groups}
                self._say_domain()
            case wire.Prefetch():
                connection.sendall(wire.encode(self._verdict(message)))
                self.verdicts_sent += 1
            case wire.Reserve():
                connection.sendall(wire.encode(self._reserve(message)))
            case wire.Ack():
                for key, slot in self._jobs.pop(message.job, []):
                    self._write(key, slot, state=slot_table.READY)
                    self._known[key] = slot
            case wire.FileDigests() if not message.digests:
                connection.sendall(wire.encode(wire.FileDigests(message.rid, [], [b""] * len(message.files))))
            case _:
                pass

    def _say_domain(self) -> None:
        if len(self._parts) < 2:
            return
        domain = identity.combine(
            scheduler_part=self._parts["scheduler"], shared_part=self._parts["worker"], rank_parts=[b""]
        )
        message = wire.encode(wire.Domain(0, "known", domain, "", list(self._layouts.values())))
        for connection in self._connections:
            connection.sendall(message)

    def _verdict(self, message: wire.Prefetch) -> wire.Verdict:
        groups = []
        for keys in message.groups:
            slots = [self._known.get((keys.group, block_hash)) for block_hash in keys.hashes]
            end = next((i for i, slot in enumerate(slots) if slot is None), len(slots))
            hits = [slot for slot in slots[:end] if slot is not None]
            lie = 1 if self.script.lie_about_generation else 0
            rest = len(slots) - end
            groups.append(
                wire.GroupVerdict(
                    keys.group,
                    bytes([wire.HIT] * end + [wire.MISS] * rest),
                    bytes([wire.TIER_RAM] * end + [wire.TIER_NONE] * rest),
                    hits + [0] * rest,
                    [self._generation(slot) - lie for slot in hits] + [0] * rest,
                )
            )
        lease_until_ns = time.monotonic_ns() + int(LEASE_SECONDS * 1e9)
        return wire.Verdict(message.rid, message.request, True, lease_until_ns, groups)

    def _reserve(self, message: wire.Reserve) -> wire.Reserved:
        kinds, slots, generations, job = [], [], [], []
        taken = set(self._known.values()) | {slot for entries in self._jobs.values() for _, slot in entries}
        free = (slot for slot in range(self._slots) if slot not in taken)
        for key in message.keys:
            name = (key.group, key.block_hash)
            slot = None if name in self._known else next(free, None)
            if slot is None:
                kinds.append(wire.EXISTS if name in self._known else wire.FULL)
                slots.append(0)
                generations.append(0)
                continue
            self._write(name, slot, state=slot_table.WRITING)
            job.append((name, slot))
            kinds.append(wire.SLOT)
            slots.append(slot)
            generations.append(self._generation(slot))
        self._jobs[message.job] = job
        write_until_ns = time.monotonic_ns() + int(LEASE_SECONDS * 1e9)
        return wire.Reserved(message.rid, message.job, bytes(kinds), slots, generations, write_until_ns)

    def _generation(self, slot: int) -> int:
        return slot_table.read_state(self._table, slot)[0]

    def _write(self, key: tuple[int, bytes], slot: int, *, state: int) -> None:
        layout = self._layouts[key[0]]
        generation = self._generation(slot) + (1 if state == slot_table.WRITING else 0)
        record = slot_table.SlotRecord(
            generation=generation,
            lease_until_ns=0,
            payload_offset=slot * SLOT_BYTES,
            recency=0,
            checksum=0,
            owner=0,
            payload_bytes=layout.payload_bytes,
            group=key[0],
            position=0,
            state=state,
            flags=0,
            domain=bytes(16),
            block_hash=key[1],
            parent_hash=bytes(32),
        )
        slot_table.pack_record(self._table, slot, record)
