"""Which engine processes are connected, and what follows from their coming and going.

Invariant: at most one session per (engine, role, rank); when one ends, what its process may still be reading or writing
stays untouched until that process announces itself anew, is known gone, or its leases end.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpool_agent.engines import REFUSED, Engine
from kvpool_agent.event_feed import EventFeed
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.peer import Peer
from kvpool_agent.slot_store import SlotStore
from kvpool_agent.write_jobs import owner_of
from kvpool_core.wire import Domain, EngineLoad, Hello

if TYPE_CHECKING:
    from kvpool_agent.session import Session

SessionKey = tuple[str, str, int]
"""(engine id, role, rank)"""

WATCHED_MAX = 512
"""Ended connections whose processes are watched for their end; beyond that, leases end by time."""

log = logging.getLogger("kvpool.agent.registry")


class EngineRegistry:
    """Engines and their sessions."""

    def __init__(
        self, store: SlotStore, feed: EventFeed, metrics: AgentMetrics, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._store = store
        self._feed = feed
        self._metrics = metrics
        self._loop = loop
        self._engines: dict[str, Engine] = {}
        self._sessions: dict[SessionKey, Session] = {}
        self._watched: OrderedDict[SessionKey, int] = OrderedDict()

    def engines(self) -> list[Engine]:
        """Engines with at least one connection."""
        return list(self._engines.values())

    def mismatch(self, peer: Peer) -> str:
        """Why this process cannot belong to the engine it names; "" when it can."""
        hello = peer.hello
        former = self._sessions.get(_key(hello))
        if former is not None and former.peer.is_alive() and _is_another(peer, former.peer):
            return (
                f"{former.peer} is connected as {hello.role} {hello.rank} of engine {hello.engine_id}: "
                "give every engine an id of its own (remove engine_id from --kv-transfer-config)"
            )
        engine = self._engines.get(hello.engine_id)
        others = [key for key in self._sessions if key[0] == hello.engine_id and key != _key(hello)]
        return engine.mismatch(hello, peer.pod) if engine is not None and others else ""

    def admit(self, session: Session) -> None:
        """Enter a process, closing a former connection of the same one, and tell it of its engine's domain."""
        hello = session.hello
        former = self._sessions.get(_key(hello))
        if former is not None:
            log.info("a process connected anew", extra={"data": {"engine": hello.engine_id, "role": hello.role}})
            former.connection.close()
        engine = self._engines.get(hello.engine_id)
        if engine is None:
            engine = Engine(hello.engine_id, hello.dp_rank, hello.world_size, hello)
            self._engines[hello.engine_id] = engine
        engine.pod = session.peer.pod
        session.engine = engine
        self._sessions[_key(hello)] = session
        self._metrics.connections.labels(hello.role).inc()
        if hello.role == "scheduler":
            engine.hello = hello
            engine.scheduler_connected = True
            self._feed.engine_changed(engine.info())
        else:
            self._store.rank_connected(owner_of(hello.engine_id), hello.rank)
        session.connection.send(_domain_message(engine))

    def settle(self, engine: Engine) -> None:
        """A part was registered or lost: tell the engine and the router if the domain changed with it."""
        if not engine.settle(self._store.pool.allocator.fits):
            return
        level = logging.WARNING if engine.domain.state == REFUSED else logging.INFO
        data = {"engine": engine.engine_id, "state": engine.domain.state, "domain": engine.domain.domain.hex()}
        log.log(level, "domain of an engine", extra={"data": {**data, "reason": engine.domain.reason}})
        for (engine_id, _role, _rank), session in list(self._sessions.items()):
            if engine_id == engine.engine_id:
                session.connection.send(_domain_message(engine))
        self._feed.engine_changed(engine.info())

    def loaded(self, engine: Engine, message: EngineLoad) -> None:
        """An engine has more or less to do: routers want to know."""
        engine.requests, engine.prompt_tokens = message.requests, message.prompt_tokens
        self._feed.engine_changed(engine.info())

    def forget(self, session: Session, pidfd: int | None) -> None:
        """A connection ended. `pidfd` is ours to close."""
        hello, engine = session.hello, session.engine
        if engine is None or self._sessions.get(_key(hello)) is not session:
            _close(pidfd)
            return
        del self._sessions[_key(hello)]
        self._metrics.connections.labels(hello.role).dec()
        if hello.role == "scheduler":
            self._forget_scheduler(engine)
            self._watch(_key(hello), pidfd, lambda: self._scheduler_gone(_key(hello)))
        else:
            engine.workers.pop(hello.rank, None)
            owner = owner_of(hello.engine_id)
            lost = self._store.rank_lost(owner, hello.rank)
            if lost:
                data = {"engine": hello.engine_id, "rank": hello.rank, "jobs": len(lost)}
                log.warning("a worker left in the midst of stores", extra={"data": data})
            self._watch(_key(hello), pidfd, lambda: self._store.rank_done(owner, hello.rank, hello.world_size, lost))
        if any(key[0] == hello.engine_id for key in self._sessions):
            self.settle(engine)
        else:
            del self._engines[hello.engine_id]

    def count(self, state: str) -> int:
        """Engines whose domain is in that state."""
        return sum(engine.domain.state == state for engine in self._engines.values())

    def close(self) -> None:
        """End every session."""
        for session in list(self._sessions.values()):
            session.connection.close()
        for key in list(self._watched):
            self._unwatch(key)

    def _forget_scheduler(self, engine: Engine) -> None:
        engine.scheduler = None
        engine.scheduler_connected = False
        engine.requests = engine.prompt_tokens = 0
        self._feed.engine_lost(engine.engine_id)
        self._feed.engine_changed(engine.info())

    def _scheduler_gone(self, key: SessionKey) -> None:
        """The process has ended: nobody will use its leases, unless another one took its place."""
        if key in self._sessions:
            return
        for request in self._store.leases.requests_of(key[0]):
            self._store.leases.release(key[0], request)

    def _watch(self, key: SessionKey, pidfd: int | None, when_gone: Callable[[], None]) -> None:
        """Call back once the process has ended; at once if it has already."""
        if pidfd is None:
            return

        def gone() -> None:
            self._unwatch(key)
            when_gone()

        self._unwatch(key)
        if len(self._watched) >= WATCHED_MAX:
            self._unwatch(next(iter(self._watched)))
        self._watched[key] = pidfd
        self._loop.add_reader(pidfd, gone)

    def _unwatch(self, key: SessionKey) -> None:
        pidfd = self._watched.pop(key, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)


def _is_another(peer: Peer, former: Peer) -> bool:
    """Across PID namespaces numbers are 0 and tell nothing; the pod then does."""
    return peer.pod != former.pod or (0 not in (peer.pid, former.pid) and peer.pid != former.pid)


def _key(hello: Hello) -> SessionKey:
    return hello.engine_id, hello.role, hello.rank


def _domain_message(engine: Engine) -> Domain:
    domain = engine.domain
    return Domain(0, domain.state, domain.domain, domain.reason, list(domain.groups))


def _close(pidfd: int | None) -> None:
    if pidfd is not None:
        os.close(pidfd)
