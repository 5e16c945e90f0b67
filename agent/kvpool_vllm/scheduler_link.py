"""The scheduler process's connection to the agent: greeting, registration, domain, verdicts.

Invariants: its callbacks run on the client's thread and only set fields that the engine's thread reads; every connection is
sent the registration, by whichever comes second: the connection, or the identification on a thread of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from kvpool_core import wire
from kvpool_vllm.agent_client import AgentClient
from kvpool_vllm.domain_wait import DomainWait

logger = logging.getLogger("vllm.kvpool")

CONNECTED_SECONDS = 30.0
"""Wait of the identification thread for its agent, which may save it the reading of all weights: a token is being reviewed, or
the agent starts just now. Without an agent there is no cache to be late for."""
DIGEST_ANSWER_SECONDS = 2.0
"""Wait of the identification thread for remembered digests; without an answer it reads the files."""


class SchedulerLink:
    """Implements `agent_client.Peer` for the scheduler process."""

    def __init__(
        self,
        socket_path: str,
        make_hello: Callable[[], wire.Hello],
        *,
        on_verdict: Callable[[wire.Verdict], None],
        held: Callable[[], list[tuple[str, int, int]]],
        on_greeted: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._make_hello = make_hello
        self._on_verdict = on_verdict
        self._held = held
        self._on_greeted = on_greeted
        self._on_idle = on_idle
        self._registration: wire.RegisterScheduler | None = None
        self.domain_wait = DomainWait()
        self._is_connected = threading.Event()
        self.arena_id = b""
        self.domain = b""
        self.refusal = ""
        self.session = 0
        self.protocol = wire.PROTOCOL_OLDEST
        self.client = AgentClient(socket_path, self, name="scheduler")

    def publish(self, registration: wire.RegisterScheduler) -> None:
        """The engine is identified: register now and after each reconnect."""
        self._registration = registration
        self._register()

    def _register(self) -> None:
        """Send the registration if there is one. Both sides of the race come here with their own part done, so one of them
        finds the other's; where both do, the agent gets it twice, which changes nothing."""
        if self._registration is not None and self.client.send(self._registration):
            self.domain_wait.registered(time.monotonic())

    def ask_digests(self, files: Sequence[wire.FileKey]) -> list[bytes]:
        """Digests that the agent remembers; b"" for each unknown one."""
        self._is_connected.wait(CONNECTED_SECONDS)
        message = wire.FileDigests(self.client.next_id(), list(files), [])
        answer = self.client.request(message, timeout_seconds=DIGEST_ANSWER_SECONDS)
        if isinstance(answer, wire.FileDigests) and len(answer.digests) == len(files):
            return answer.digests
        return [b""] * len(files)

    def teach_digests(self, files: Sequence[wire.FileKey], digests: Sequence[bytes]) -> None:
        """Let the agent remember digests for the next engine on this node."""
        self.client.send(wire.FileDigests(0, list(files), list(digests)))

    # --- agent_client.Peer ----------------------------------------------------------------------------------------

    def hello(self) -> wire.Hello:
        """The scheduler's greeting."""
        return self._make_hello()

    def on_welcome(self, welcome: wire.Welcome, descriptors: Sequence[int]) -> list[wire.Message]:
        """Only workers map the arena. Leases of the same arena are announced, those of another are worthless."""
        for descriptor in descriptors:
            os.close(descriptor)
        held = self._held() if welcome.arena_id == self.arena_id else []
        self.arena_id = welcome.arena_id
        self.protocol = welcome.protocol
        self._on_greeted()
        return [self._announcement(held)]

    def on_connected(self) -> None:
        """The identification may have ended while the agent was greeted: only now does `send` reach it."""
        self.domain_wait.begin(time.monotonic())
        self._is_connected.set()
        self._register()

    def on_standby(self, standby: wire.Standby) -> list[wire.Message]:
        """Nothing to unmap: only workers map the arena."""
        return [wire.Unmapped(0)] if standby.unmap else []

    def on_refused(self, refused: wire.Refused) -> None:
        """The client says so; without an agent nothing is looked up or offered."""

    def on_absent(self, seconds: float) -> None:
        """Without an agent nothing is looked up or offered."""

    def on_message(self, message: wire.AgentMessage) -> None:
        """Domain, verdicts, and the call to announce everything again."""
        if isinstance(message, wire.Verdict):
            self._on_verdict(message)
        elif isinstance(message, wire.Domain):
            self._take_domain(message)
        elif isinstance(message, wire.Reannounce):
            self.client.send(self._announcement(self._held()))
            self._on_greeted()

    def on_idle(self) -> None:
        """Nothing was received for a moment."""
        complaint = self.domain_wait.complaint(time.monotonic())
        if complaint:
            logger.warning("kvpool: %s", complaint)
        self._on_idle()

    def on_disconnected(self) -> None:
        """Without an agent nothing is looked up or offered."""
        self.domain_wait.end()
        self._is_connected.clear()
        self.domain = b""
        self.session += 1  # after the domain is gone: whoever reads the session first sees either both or neither

    def _take_domain(self, message: wire.Domain) -> None:
        self.domain_wait.told(message.state, message.reason, time.monotonic())
        domain = message.domain if message.state == "known" else b""
        if domain and domain != self.domain:
            logger.info("kvpool: domain %s, blocks are shared with engines of the same domain", domain.hex())
        is_ours = self._registration is not None and bool(self._registration.problem)  # said when it was found
        if message.state == "refused" and message.reason != self.refusal and not is_ours:
            logger.warning("kvpool: no blocks are loaded or stored: the agent refused this engine: %s", message.reason)
        self.refusal = message.reason if message.state == "refused" else ""
        self.domain = domain

    def _announcement(self, held: list[tuple[str, int, int]]) -> wire.Announce:
        """A load from a slot that is left out fails if the slot is taken meanwhile."""
        held = held[: wire.ANNOUNCED_SLOTS_MAX]
        requests, slots, generations = ([row[i] for row in held] for i in range(3))
        return wire.Announce(self.client.next_id(), requests, slots, generations)  # type: ignore[arg-type]
