"""The connector's connection to an agent that is absent, dies, or comes late."""

from __future__ import annotations

import logging
import select
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool_core import wire
from kvpool_vllm.agent_client import AgentClient
from kvpool_vllm.backoff import FIRST_SECONDS, LAST_SECONDS, STABLE_SECONDS, Backoff
from kvpool_vllm.scheduler_link import SchedulerLink
from kvpool_vllm.worker_link import ABANDON_SECONDS, WorkerLink
from tests.unit.agent_peer import LAYOUT, Engine, Peer, hello, running_node, wait_for

FILE = wire.FileKey(1, 2, 3, 4, b"sample")


class CpuArena:
    """Stands for a copier, with nothing to register."""

    def mark(self) -> object:
        return None

    def copy(self, source: object, destination: object, sizes: object, *, to_cache: bool, after: object) -> None:
        raise NotImplementedError

    def register(self, address: int, size: int) -> list[int]:  # noqa: ARG002
        return []

    def unregister(self, registered: list[int]) -> None:
        assert not registered


class TokenlessOwner:
    """Its greeting fails in a way that nobody thought of."""

    def __init__(self) -> None:
        self.absences = 0

    def hello(self) -> wire.Hello:
        raise ValueError("no token of text")

    def on_welcome(self, welcome: wire.Welcome, descriptors: Sequence[int]) -> list[wire.Message]:
        raise NotImplementedError

    def on_connected(self) -> None:
        raise NotImplementedError

    def on_standby(self, standby: wire.Standby) -> list[wire.Message]:
        raise NotImplementedError

    def on_refused(self, refused: wire.Refused) -> None:
        raise NotImplementedError

    def on_absent(self, seconds: float) -> None:  # noqa: ARG002
        self.absences += 1

    def on_message(self, message: wire.AgentMessage) -> None:
        raise NotImplementedError

    def on_idle(self) -> None:
        raise NotImplementedError

    def on_disconnected(self) -> None:
        raise NotImplementedError


def test_agent_that_was_there_for_a_while_is_looked_for_at_once() -> None:
    backoff = Backoff()
    waits = [backoff.after(0.0, 1.0) for _ in range(8)]
    assert waits[0] == FIRST_SECONDS
    assert waits[-1] == LAST_SECONDS
    assert backoff.after(STABLE_SECONDS, 1.0) == FIRST_SECONDS


def test_agent_that_breaks_every_connection_is_tried_ever_later() -> None:
    backoff = Backoff()
    waits = [backoff.after(1.0, 0.5) for _ in range(8)]
    assert waits == sorted(waits)
    assert waits[-1] == 0.75 * LAST_SECONDS


def test_wake_for_a_lost_connection_does_not_keep_the_thread_from_sleeping(tmp_path: Path) -> None:
    """A frame that the agent had not read when it died left one: the thread then tried to connect in a busy loop."""
    client = AgentClient(str(tmp_path / "agent.sock"), TokenlessOwner(), name="test")
    client._wake()
    client._sleep(0.0)
    assert not select.select([client._wake_read], [], [], 0)[0]


def test_unexpected_error_at_each_try_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_node(tmp_path) as node, caplog.at_level(logging.WARNING, "vllm.kvpool"):
        owner = TokenlessOwner()
        client = AgentClient(str(node.socket_path), owner, name="test")
        client.start()
        wait_for(lambda: owner.absences >= 3, "several tries")
        client.close()
    [record] = [record for record in caplog.records if "has no agent" in record.message]
    assert "no token of text" in record.message
    assert record.exc_info is not None, "nobody expected it: where it came from is of interest"


def test_worker_reserves_nothing_before_the_agent_knows_the_domain(tmp_path: Path) -> None:
    """A store that was queued when the agent died comes to the new one before the scheduler does."""
    with running_node(tmp_path) as node:
        link = WorkerLink(
            str(node.socket_path),
            lambda: hello("engine-a", "worker"),
            wire.RegisterWorker(0, b"w" * 16, b"", [LAYOUT]),
            CpuArena(),
            rank=0,
        )
        link.client.start()
        wait_for(lambda: link.connected, "the connection")
        assert not link.can_reserve
        scheduler = Peer(node.socket_path)
        scheduler.send(hello("engine-a", "scheduler"))
        scheduler.receive(wire.Welcome)
        scheduler.send(wire.RegisterScheduler(0, b"s" * 16, ""))
        wait_for(lambda: link.can_reserve, "the domain")
        node.stop()
        wait_for(lambda: not link.can_reserve, "the loss to be seen")
        scheduler.close()
        link.close()
        link.on_absent(ABANDON_SECONDS)


def test_remembered_digests_are_waited_for_while_the_connection_is_being_made(tmp_path: Path) -> None:
    """Otherwise an engine that starts beside a running agent reads all its weights again."""
    with running_node(tmp_path) as node:
        teacher = Engine(node)
        teacher.scheduler.send(wire.FileDigests(7, [FILE], [b"digest"]))
        teacher.scheduler.receive(wire.FileDigests, rid=7)
        link = SchedulerLink(
            str(node.socket_path),
            lambda: hello("engine-b", "scheduler", versions=(wire.PROTOCOL_OLDEST, wire.PROTOCOL_VERSION)),
            on_verdict=lambda _verdict: None,
            held=list,
            on_greeted=lambda: None,
            on_idle=lambda: None,
        )
        link.client.start()
        assert link.ask_digests([FILE]) == [b"digest"]
        link.client.close()
        teacher.close()
