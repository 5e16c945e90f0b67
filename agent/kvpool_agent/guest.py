"""A connection from its acceptance to its Welcome: Hello, authentication, waiting for the arena.

Invariant: a guest gets neither descriptors nor answers to anything but Hello; it becomes a session, or its connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Protocol

from kvpool_agent import checks
from kvpool_agent.authentication import Authenticator
from kvpool_agent.connection import Connection
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.peer import Peer
from kvpool_agent.peer_error import GARBAGE, HELLO_MISSING, NOT_ADMITTED, VERSION, WRONG_STATE, PeerError
from kvpool_agent.pod_identity import PodIdentity, Refusal
from kvpool_core.errors import FrameError
from kvpool_core.wire import (
    PROTOCOL_STANDBY,
    TEMPORARY_REFUSALS,
    EngineMessage,
    Hello,
    Refused,
    Standby,
    Unmapped,
    choose_version,
    decode_engine_message,
)

HELLO_TIMEOUT_SECONDS = 5.0

log = logging.getLogger("kvpool.agent.guest")


class Host(Protocol):
    """What a guest needs of the server."""

    metrics: AgentMetrics
    authenticator: Authenticator | None

    def greeted(self, guest: Guest) -> None:
        """The guest has said Hello, or its pod became known."""

    def not_admitted(self, guest: Guest, refusal: Refusal) -> None:
        """For now nobody can say who the guest is."""

    def left(self, guest: Guest) -> None:
        """The guest's connection has ended."""


class Guest:
    """One connection that has not been welcomed yet."""

    def __init__(self, connection: Connection, number: int, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        self._host = host
        self._loop = loop
        self._number = number
        self._connection = connection
        self._authentication: asyncio.Task[None] | None = None
        self._pidfd = connection.peer_pidfd()
        self.hello: Hello | None = None
        self.protocol = 0
        self.pod: PodIdentity | None = None
        self.mapped_arena = b""
        """The arena that the process maps, as far as it has said."""
        self._hello_timer = loop.call_later(HELLO_TIMEOUT_SECONDS, self._hello_late)
        connection.start(self._on_frame, self._on_closed)

    @property
    def is_admitted(self) -> bool:
        """Whether it said Hello and proved who it is, where that is asked for."""
        return self.hello is not None and (self.pod is not None or self._host.authenticator is None)

    @property
    def can_stand_by(self) -> bool:
        """Whether its version knows Standby."""
        return self.protocol >= PROTOCOL_STANDBY

    def authenticate(self) -> None:
        """Have the token reviewed, unless that is under way."""
        if self._authentication is None and self._host.authenticator is not None:
            self._authentication = self._loop.create_task(
                self._authenticate(self._host.authenticator), name=f"authentication {self._number}"
            )

    def stand_by(self, *, unmap: bool, reason: str) -> None:
        """Tell it that there is no arena yet."""
        self._connection.send(Standby(self.hello.rid if self.hello else 0, unmap, reason))

    def refuse(self, reason: str, refusal: Refusal) -> None:
        """Say why not, and end the connection."""
        self._connection.send(Refused(self.hello.rid if self.hello else 0, refusal.code, refusal.message))
        self._connection.fail(PeerError(reason, f"{refusal.code}: {refusal.message}"))

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def release(self) -> Peer:
        """Give the connection to a session; this guest is over."""
        assert self.hello is not None
        self._hello_timer.cancel()
        pidfd, self._pidfd = self._pidfd, None
        return Peer(
            connection=self._connection,
            number=self._number,
            hello=self.hello,
            protocol=self.protocol,
            pod=self.pod,
            pid=self._connection.peer_pid(),
            pidfd=pidfd,
        )

    # --- inside -----------------------------------------------------------------------------------------------------

    def _on_frame(self, body: bytes) -> None:
        try:
            message = decode_engine_message(body)
        except FrameError as error:
            raise PeerError(GARBAGE, str(error)) from error
        if self.hello is None:
            self._greet(message)
        elif isinstance(message, Unmapped):
            self.mapped_arena = b""
        else:
            raise PeerError(WRONG_STATE, f"{type(message).__name__} before Welcome")

    def _greet(self, message: EngineMessage) -> None:
        if not isinstance(message, Hello):
            raise PeerError(HELLO_MISSING, f"{type(message).__name__} before Hello")
        version = choose_version(message.protocol_min, message.protocol_max)
        if version is None:
            theirs = f"{message.protocol_min} to {message.protocol_max}"
            text = f"no common protocol version with {theirs}: use one release"
            self._connection.send(Refused(message.rid, "UnsupportedProtocol", text))
            raise PeerError(VERSION, text)
        checks.check_hello(message)
        self._hello_timer.cancel()
        self.hello, self.protocol, self.mapped_arena = message, version, message.arena_id
        self.authenticate()
        self._host.greeted(self)

    async def _authenticate(self, authenticator: Authenticator) -> None:
        assert self.hello is not None
        try:
            outcome = await authenticator.admit(self.hello.token)
        except Exception:
            log.exception("could not authenticate an engine")
            self._host.metrics.loop_errors.labels("authentication").inc()
            self.close()
            return
        self._authentication = None
        if isinstance(outcome, PodIdentity):
            self.pod = outcome
            self._host.greeted(self)
        elif outcome.code not in TEMPORARY_REFUSALS or not self.can_stand_by:
            self.refuse(NOT_ADMITTED, outcome)
        else:
            self._host.not_admitted(self, outcome)

    def _hello_late(self) -> None:
        self._connection.fail(PeerError(HELLO_MISSING, f"no Hello within {HELLO_TIMEOUT_SECONDS} s"))

    def _on_closed(self, error: PeerError | None) -> None:
        self._hello_timer.cancel()
        if self._authentication is not None:
            self._authentication.cancel()
        if error is not None:
            self._host.metrics.protocol_errors.labels(error.reason).inc()
            who = {"engine": self.hello.engine_id, "role": self.hello.role} if self.hello else {}
            data = {"connection": self._number, "reason": error.reason, "detail": str(error), **who}
            log.warning("closed a connection", extra={"data": data})
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._host.left(self)
