"""The agent's Unix socket: accepts connections and leads each from guest to session.

Invariant: the socket exists only while its lock is held; a failing accept never ends the loop; nobody is welcomed before
there is an agent with a complete arena, and then everybody who waits and may still use the pool is.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import count

from kvpool_agent.agent import Agent
from kvpool_agent.authentication import Authenticator
from kvpool_agent.connection import Connection
from kvpool_agent.guest import Guest
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.peer_error import NOT_ADMITTED, STANDING_BY
from kvpool_agent.pod_identity import PodIdentity, Refusal, not_allowed
from kvpool_agent.session import Session
from kvpool_agent.unix_listener import UnixListener
from kvpool_core.wire import ARENA_PENDING, Refused

CONNECTIONS_MAX = 512
"""Processes on one node: eight GPUs with a dozen engines each are far fewer."""
ACCEPT_RETRY_SECONDS = 0.5
"""After an accept that failed."""
STANDBY_PERIOD_SECONDS = 2.0
"""Guests hear this often that they are waited with: below the 5 s after which they would give the connection up."""

log = logging.getLogger("kvpool.agent.server")


class Server:
    """Accepts until closed. `kept_arena`: None until it is known which arena will be served, b"" for one to be made."""

    def __init__(
        self,
        listener: UnixListener,
        *,
        loop: asyncio.AbstractEventLoop,
        metrics: AgentMetrics,
        authenticator: Authenticator | None,
    ) -> None:
        self.metrics = metrics
        self.authenticator = authenticator
        self._loop = loop
        self._listener = listener
        self._numbers = count(1)
        self._guests: set[Guest] = set()
        self._sessions: set[Session] = set()
        self._agent: Agent | None = None
        self._kept_arena: bytes | None = None
        self._reason = "the agent is starting"
        self._turned_away = 0
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    # --- before there is an arena -----------------------------------------------------------------------------------

    def stand_by(self, *, kept_arena: bytes, reason: str) -> None:
        """Have guests wait; those that map another arena than `kept_arena` are asked to unmap it."""
        is_news = kept_arena != self._kept_arena
        self._kept_arena, self._reason = kept_arena, reason
        if is_news:
            self._tell_guests()

    async def keep_guests(self) -> None:
        """Tell those who wait that they are not forgotten, until cancelled."""
        while True:
            await asyncio.sleep(STANDBY_PERIOD_SECONDS)
            self._tell_guests()

    def mapping_guests(self) -> list[Guest]:
        """Guests that still map an arena which will not be served any more."""
        return [guest for guest in self._guests if self._must_unmap(guest)]

    @property
    def guests(self) -> int:
        """Connections that have said Hello and wait."""
        return sum(guest.hello is not None for guest in self._guests)

    def open(self, agent: Agent) -> None:
        """There is an arena: welcome everybody."""
        self._agent = agent
        for guest in list(self._guests):
            if guest.hello is not None:
                self.greeted(guest)

    # --- guests -----------------------------------------------------------------------------------------------------

    def greeted(self, guest: Guest) -> None:
        """Part of `guest.Host`."""
        if self._agent is None:
            self._receive(guest)
        elif guest.is_admitted:
            self._guests.discard(guest)
            session = Session(self._agent, guest.release(), self._sessions.discard)
            if not session.connection.closed:  # the welcome itself may have ended it
                self._sessions.add(session)
        else:
            guest.authenticate()

    def not_admitted(self, guest: Guest, refusal: Refusal) -> None:
        """Part of `guest.Host`: while there is no arena it may wait, so that it can be asked to unmap a former one."""
        if self._agent is not None:
            guest.refuse(NOT_ADMITTED, refusal)

    def left(self, guest: Guest) -> None:
        """Part of `guest.Host`."""
        self._guests.discard(guest)

    def _receive(self, guest: Guest) -> None:
        if not guest.can_stand_by:
            guest.refuse(STANDING_BY, Refusal(ARENA_PENDING, f"there is no arena yet: {self._reason}"))
        elif self._must_unmap(guest):
            guest.stand_by(unmap=True, reason=self._reason)

    def _must_unmap(self, guest: Guest) -> bool:
        return self._kept_arena is not None and guest.mapped_arena not in (b"", self._kept_arena)

    def _tell_guests(self) -> None:
        for guest in list(self._guests):
            if guest.hello is not None and guest.can_stand_by:
                guest.stand_by(unmap=self._must_unmap(guest), reason=self._reason)

    # --- both -------------------------------------------------------------------------------------------------------

    def recheck(self) -> None:
        """The allowed namespaces changed: send those away that may not use the pool any more, guests too."""
        for session in list(self._sessions):
            if (refusal := self._why_not(session.peer.pod)) is not None:
                log.warning("sent an engine away", extra={"data": {"code": refusal.code, "who": str(session.peer)}})
                session.connection.send(Refused(0, refusal.code, refusal.message))
                session.connection.close()
        for guest in list(self._guests):
            if (refusal := self._why_not(guest.pod)) is not None:
                guest.refuse(NOT_ADMITTED, refusal)

    def _why_not(self, pod: PodIdentity | None) -> Refusal | None:
        """Why an identified pod may not use the pool by now."""
        if self.authenticator is None or pod is None or self.authenticator.is_allowed(pod):
            return None
        return not_allowed(pod)

    def close(self) -> None:
        """Accept no more and close what is open; may be called again."""
        self._loop.remove_reader(self._listener.socket)
        if self._retry is not None:
            self._retry.cancel()
        for guest in list(self._guests):
            guest.close()
        for session in list(self._sessions):
            session.connection.close()

    def _accept(self) -> None:
        try:
            sock, _address = self._listener.socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, mostly: those waiting would wake the loop without end
            self._note_accepting(f"could not accept a connection: {error.strerror or error}")
            self._loop.remove_reader(self._listener.socket)
            self._retry = self._loop.call_later(ACCEPT_RETRY_SECONDS, self._listen)
            return
        if len(self._sessions) + len(self._guests) >= CONNECTIONS_MAX:
            self.metrics.protocol_errors.labels("too_many_connections").inc()
            self._note_accepting(f"there are {CONNECTIONS_MAX} connections already")
            sock.close()
            return
        self._note_accepting("")
        guest = Guest(Connection(sock, self._loop), next(self._numbers), self, self._loop)
        self._guests.add(guest)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.socket, self._accept)

    def _note_accepting(self, problem: str) -> None:
        """One line when connections begin to be turned away, and one when they do not any more."""
        if problem and not self._turned_away:
            log.warning("turning connections away", extra={"data": {"reason": problem}})
        elif self._turned_away and not problem:
            log.info("taking connections again", extra={"data": {"turned_away": self._turned_away}})
        self._turned_away = self._turned_away + 1 if problem else 0
