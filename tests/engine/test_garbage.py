"""Clients that speak no protocol, the wrong one, or die half-way: logged once each, counted, others unharmed."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import pytest

from kvpool_core import wire
from kvpool_core.frames import MAX_FRAME_BYTES, FrameDecoder
from tests.engine.answers import Loads, reference_pair, whole_blocks
from tests.engine.conftest import fresh_prompt, settle, wait_for
from tests.harness.engine import Engine
from tests.harness.engine_client import metric_sum
from tests.harness.node import Node
from tests.harness.stack import Stack

M = TypeVar("M", bound=wire.Message)


def connect(node: Node) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5)
    client.connect(str(node.socket))
    return client


def hello(**changes: object) -> wire.Hello:
    fields: dict[str, object] = {
        "rid": 1,
        "protocol_min": wire.PROTOCOL_OLDEST,
        "protocol_max": wire.PROTOCOL_VERSION,
        "engine_id": "attacker",
        "role": "worker",
        "rank": 0,
        "world_size": 1,
        "dp_rank": 0,
        "endpoint": "127.0.0.1:1",
        "served_names": ["x"],
        "block_size": 32,
        "hash_seed": "s",
        "token": "",
    }
    return wire.Hello(**{**fields, **changes})  # type: ignore[arg-type]


NOISE = random.Random(10).randbytes(4096)
GARBAGE = {
    "noise": ("frame_too_long", b"\xff\xff\xff\xff" + NOISE),
    "noise in a frame": ("garbage", struct.pack("<I", len(NOISE)) + NOISE),
    "over the limit": ("frame_too_long", struct.pack("<I", MAX_FRAME_BYTES + 1) + b"x" * 64),
    "truncated": ("truncated", struct.pack("<I", 1000) + b"half"),
    "not a message": ("garbage", struct.pack("<I", 3) + b"\x93\x01\x02"),
    "a reply": ("garbage", wire.encode(wire.Reannounce(0))),
}
"""Kind to the label under which it is counted, and its bytes."""


class Evidence:
    """What an agent counted and logged since this was made, and who is connected."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lines = len(node.agent.log_text().splitlines())
        self._counted = self._count()
        self._connected = self._connections()

    def said(self, message: str) -> list[str]:
        """Lines with that message."""
        lines = self._node.agent.log_text().splitlines()[self._lines :]
        return [line for line in lines if f'"{message}"' in line]

    def assert_once(self, reason: str) -> None:
        """One connection was closed for that reason, and nobody else's; it is logged once and counted once."""
        wait_for(lambda: self._count() != self._counted, seconds=5, what="it is counted")
        assert self._count() - self._counted == Counter({reason: 1})
        (line,) = self.said("closed a connection")
        assert f'"{reason}"' in line
        # engines of later tests may have come meanwhile
        wait_for(lambda: self._connections() >= self._connected, seconds=5, what="all others are connected")

    def _count(self) -> Counter[str]:
        text = self._node.metrics()
        reasons = {reason for reason, _ in GARBAGE.values()} | {"version"}
        counted = {
            reason: int(metric_sum(text, "kvpool_agent_protocol_errors_total", reason=reason)) for reason in reasons
        }
        assert sum(counted.values()) <= metric_sum(text, "kvpool_agent_protocol_errors_total")
        return Counter(counted)

    def _connections(self) -> float:
        return metric_sum(self._node.metrics(), "kvpool_agent_connections")


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_closes_its_connection_and_nothing_else(fleet: Stack, reference: Engine, kind: str) -> None:
    a, node, prompt = fleet.engines[0], fleet.nodes[0], fresh_prompt()
    reason, sent = GARBAGE[kind]
    evidence = Evidence(node)
    with connect(node) as client:
        client.sendall(sent)
        if kind == "truncated":
            client.shutdown(socket.SHUT_WR)
        assert_closed(client)
    evidence.assert_once(reason)
    assert_works(a, node, reference, prompt)


def test_other_protocol_version_is_refused_with_a_reason(fleet: Stack, reference: Engine) -> None:
    a, node, prompt = fleet.engines[0], fleet.nodes[0], fresh_prompt()
    evidence = Evidence(node)
    with connect(node) as client:
        client.sendall(wire.encode(hello(protocol_min=90, protocol_max=91)))
        (body,) = FrameDecoder().feed(client.recv(1 << 16))
        answer = wire.decode_agent_message(body)
        assert isinstance(answer, wire.Refused)
        assert answer.code == "UnsupportedProtocol"
        assert_closed(client)
    evidence.assert_once("version")
    assert_works(a, node, reference, prompt)


def test_client_that_dies_between_reserve_and_ack_leaves_no_slot(fleet: Stack, reference: Engine) -> None:
    a, node, prompt = fleet.engines[0], fleet.nodes[0], fresh_prompt()
    settle(node)
    evidence = Evidence(node)
    failed = metric_sum(node.metrics(), "kvpool_agent_stores_total", result="failed")
    pid = os.fork()
    if pid == 0:  # a process of its own, so that its end is the kernel's word
        reserve_and_die(node)
    _, status = os.waitpid(pid, 0)
    assert os.WEXITSTATUS(status) == 0, "the client got its slots before it died"
    wait_for(lambda: is_clean(node), seconds=10, what="slots of the dead client are free")
    assert not [e for e in node.stats()["engines"] if e["engine_id"].startswith("dying-")]
    assert metric_sum(node.metrics(), "kvpool_agent_stores_total", result="failed") == failed + 1
    assert len(evidence.said("a worker left in the midst of stores")) == 1
    assert evidence.said("closed a connection") == []
    assert_works(a, node, reference, prompt)


def assert_works(engine: Engine, node: Node, reference: Engine, prompt: str) -> None:
    """An engine that did nothing wrong stores and loads."""
    expected = reference_pair(reference, prompt)
    assert engine.complete(prompt) == expected.cold
    settle(node)
    engine.reset_own_cache()
    loads = Loads(engine)
    assert engine.complete(prompt) == expected.cached
    assert loads.by_tier()["ram"] == whole_blocks(prompt)


def reserve_and_die(node: Node) -> None:
    """An engine of one rank: registers, reserves ten slots, is gone."""
    code = 1
    try:
        scheduler, worker = connect(node), connect(node)
        decoder = FrameDecoder()
        name = f"dying-{os.getpid()}"
        scheduler.sendall(wire.encode(hello(engine_id=name, role="scheduler")))
        worker.sendall(wire.encode(hello(engine_id=name)))
        for client in (scheduler, worker):
            socket.recv_fds(client, 1 << 16, 2)
        scheduler.sendall(wire.encode(wire.RegisterScheduler(0, b"s" * 16, "")))
        layout = wire.GroupLayout(0, 65536, 32, 0)
        worker.sendall(wire.encode(wire.RegisterWorker(0, b"w" * 16, b"", [layout])))
        domain = await_message(worker, decoder, wire.Domain, lambda m: m.state == "known").domain
        keys = [wire.StoreKey(0, os.urandom(32), b"", i) for i in range(10)]
        worker.sendall(wire.encode(wire.Reserve(5, 1, domain, False, keys)))
        reserved = await_message(worker, decoder, wire.Reserved, lambda _: True)
        code = 0 if reserved.kinds == bytes([wire.SLOT] * 10) else 2
    finally:
        os._exit(code)


def await_message(client: socket.socket, decoder: FrameDecoder, kind: type[M], wanted: Callable[[M], bool]) -> M:
    """The next message of a kind that is as wanted."""
    while True:
        for body in decoder.feed(client.recv(1 << 16)):
            message = wire.decode_agent_message(body)
            if isinstance(message, kind) and wanted(message):
                return message


def assert_closed(client: socket.socket) -> None:
    """The agent hangs up."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if not client.recv(1 << 16):
                return
        except ConnectionResetError:
            return
    raise AssertionError("the connection is still open")


def is_clean(node: Node) -> bool:
    slots = node.stats()["arena"]["slots"]
    return not slots.get("writing", 0) and not slots.get("quarantined", 0)
