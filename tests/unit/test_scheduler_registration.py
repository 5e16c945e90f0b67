"""An engine's scheduler registers with its agent whichever comes first, connection or identification: a real agent tells."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvpool_core import wire
from kvpool_vllm.domain_wait import AGREED_SECONDS
from kvpool_vllm.scheduler_link import SchedulerLink
from tests.unit.agent_peer import DEADLINE_SECONDS, LAYOUT, Node, Peer, hello, running_node, wait_for

REGISTRATION = wire.RegisterScheduler(0, b"s" * 16, "")


class Scheduler(SchedulerLink):
    """A scheduler's link whose identification ends at a chosen moment of its first connection."""

    def __init__(self, node: Node, engine_id: str, *, identified: str) -> None:
        self._identified = identified
        super().__init__(
            str(node.socket_path),
            lambda: hello(engine_id, "scheduler", versions=(wire.PROTOCOL_OLDEST, wire.PROTOCOL_VERSION)),
            on_verdict=lambda _verdict: None,
            held=list,
            on_greeted=lambda: None,
            on_idle=lambda: None,
        )

    def identify_at(self, moment: str) -> None:
        if moment == self._identified:
            self.publish(REGISTRATION)

    def hello(self) -> wire.Hello:
        self.identify_at("while greeting")
        return super().hello()

    def on_welcome(self, welcome: wire.Welcome, descriptors: Sequence[int]) -> list[wire.Message]:
        self.identify_at("when welcomed")
        first = super().on_welcome(welcome, descriptors)
        self.identify_at("between welcome and connection")
        return first

    def on_connected(self) -> None:
        self.identify_at("when connected")
        super().on_connected()
        self.identify_at("just after")


MOMENTS = (
    "before",
    "while greeting",
    "when welcomed",
    "between welcome and connection",
    "when connected",
    "just after",
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("n")) as running:
        yield running


def register_worker(node: Node, engine_id: str) -> Peer:
    """The engine's worker, whose part is known before it connects."""
    peer = Peer(node.socket_path)
    peer.send(hello(engine_id, "worker"))
    peer.receive(wire.Welcome)
    peer.send(wire.RegisterWorker(0, b"w" * 16, b"", [LAYOUT]))
    return peer


@pytest.fixture
def worker(node: Node, request: pytest.FixtureRequest) -> Iterator[None]:
    peer = register_worker(node, request.node.name)
    yield
    peer.close()


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("identified", MOMENTS)
def test_domain_is_known_whenever_the_identification_ends(
    node: Node, request: pytest.FixtureRequest, identified: str
) -> None:
    link = Scheduler(node, request.node.name, identified=identified)
    link.identify_at("before")
    link.client.start()
    wait_for(lambda: link.domain, "the domain")
    link.client.close()


@pytest.mark.usefixtures("worker")
def test_domain_is_known_when_the_identification_ends_on_a_standing_connection(
    node: Node, request: pytest.FixtureRequest
) -> None:
    link = Scheduler(node, request.node.name, identified="later")
    link.client.start()
    wait_for(lambda: link.client.connected, "the connection")
    assert not link.domain
    link.identify_at("later")
    wait_for(lambda: link.domain, "the domain")
    link.client.close()


def test_missing_rank_is_named_when_the_domain_is_overdue(node: Node, request: pytest.FixtureRequest) -> None:
    link = Scheduler(node, request.node.name, identified="before")
    link.identify_at("before")
    link.client.start()
    wait_for(lambda: link.client.connected, "the connection")
    later = time.monotonic() + AGREED_SECONDS + DEADLINE_SECONDS
    wait_for(lambda: "'0 of 1 workers registered'" in link.domain_wait.missing, "the agent's word")
    assert "'0 of 1 workers registered'" in link.domain_wait.complaint(later)
    peer = register_worker(node, request.node.name)
    wait_for(lambda: link.domain, "the domain")
    assert not link.domain_wait.is_overdue(later)
    link.client.close()
    peer.close()


def test_domain_is_known_again_after_every_reconnect(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with running_node(tmp_path) as node:
        link = Scheduler(node, request.node.name, identified="between welcome and connection")
        link.client.start()
        for _ in range(2):
            peer = register_worker(node, request.node.name)
            wait_for(lambda: link.domain, "the domain")
            assert node.agent is not None
            node.agent.stop(signal.SIGKILL)
            wait_for(lambda: not link.domain, "the loss to be seen")
            peer.close()
            node.start_agent()
        link.client.close()
