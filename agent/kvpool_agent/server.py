"""The agent's Unix socket: accepts connections and hands each to a session.

Invariant: the socket exists only while its lock is held, and a failing accept never ends the loop.
"""

from __future__ import annotations

import logging
from itertools import count

from kvpool_agent.agent import Agent
from kvpool_agent.connection import Connection
from kvpool_agent.session import Session
from kvpool_agent.unix_listener import UnixListener

CONNECTIONS_MAX = 512
"""Processes on one node: eight GPUs with a dozen engines each are far fewer."""

log = logging.getLogger("kvpool.agent.server")


class Server:
    """Accepts until closed."""

    def __init__(self, agent: Agent, listener: UnixListener) -> None:
        self._agent = agent
        self._listener = listener
        self._numbers = count(1)
        self._sessions: set[Session] = set()
        agent.loop.add_reader(listener.socket, self._accept)

    def close(self) -> None:
        """Accept no more and close what is open."""
        self._agent.loop.remove_reader(self._listener.socket)
        for session in list(self._sessions):
            session.connection.close()

    def _accept(self) -> None:
        try:
            sock, _address = self._listener.socket.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                log.warning("could not accept a connection", extra={"data": {"reason": str(error)}})
            return
        if len(self._sessions) >= CONNECTIONS_MAX:
            self._agent.metrics.protocol_errors.labels("too_many_connections").inc()
            sock.close()
            return
        session = Session(self._agent, Connection(sock, self._agent.loop), next(self._numbers), self._sessions.discard)
        self._sessions.add(session)
