"""One engine process's conversation: what may be said when, and what the agent does about it.

Invariant: nothing is looked up, leased or reserved for a connection before its engine's domain is known; a fault of one
peer ends its own session only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpool_agent import checks
from kvpool_agent.engines import KNOWN, Engine
from kvpool_agent.lookup import Lookup
from kvpool_agent.peer import Peer
from kvpool_agent.peer_error import GARBAGE, WRONG_KEYS, WRONG_ROLE, WRONG_STATE, PeerError
from kvpool_agent.slot_store import Rank
from kvpool_agent.write_jobs import owner_of
from kvpool_core.errors import FrameError
from kvpool_core.wire import (
    EXISTS,
    FULL,
    LOCAL,
    MISS,
    SLOT,
    Abort,
    Ack,
    Announce,
    EngineLoad,
    EngineMessage,
    FileDigests,
    GpuEvents,
    GpuSnapshot,
    GroupVerdict,
    Hello,
    Prefetch,
    Refused,
    RegisterScheduler,
    RegisterWorker,
    Release,
    Reserve,
    Reserved,
    Unmapped,
    Verdict,
    decode_engine_message,
)

if TYPE_CHECKING:
    from kvpool_agent.agent import Agent

LOOKUPS_MAX = 2048
"""Prefetches of one engine that wait for Valkey at the same time; further ones are answered from RAM alone."""

SCHEDULER = "scheduler"
WORKER = "worker"
ROLES: dict[type[EngineMessage], str] = {
    RegisterScheduler: SCHEDULER,
    Prefetch: SCHEDULER,
    Release: SCHEDULER,
    EngineLoad: SCHEDULER,
    GpuEvents: SCHEDULER,
    GpuSnapshot: SCHEDULER,
    RegisterWorker: WORKER,
    Reserve: WORKER,
    Ack: WORKER,
    Abort: WORKER,
}
"""Who may send what; what is not listed both may."""

log = logging.getLogger("kvpool.agent.session")


class Session:
    """From Welcome to the connection's end."""

    def __init__(self, agent: Agent, peer: Peer, on_ended: Callable[[Session], None]) -> None:
        self._agent = agent
        self._on_ended = on_ended
        self.peer = peer
        self.hello = peer.hello
        self.connection = peer.connection
        self.engine: Engine | None = None
        self._lookups: dict[str, tuple[Lookup, asyncio.Task[None]]] = {}
        self.connection.hand_over(self._on_frame, self._on_closed)
        self._welcome()

    def _welcome(self) -> None:
        problem = self._agent.registry.mismatch(self.peer)
        if problem:
            self.connection.send(Refused(self.hello.rid, "EngineMismatch", problem))
            self.connection.fail(PeerError(WRONG_STATE, problem))
            return
        self.connection.send(self._agent.welcome(self.hello.rid, self.peer.protocol), self._agent.arena.descriptors())
        if not self.connection.closed:
            self._agent.registry.admit(self)

    # --- frames -----------------------------------------------------------------------------------------------------

    def _on_frame(self, body: bytes) -> None:
        try:
            message = decode_engine_message(body)
        except FrameError as error:
            raise PeerError(GARBAGE, str(error)) from error
        role = ROLES.get(type(message))
        if role is not None and role != self.hello.role:
            raise PeerError(WRONG_ROLE, f"{type(message).__name__} from a {self.hello.role}")
        try:
            self._handle(message)
        except PeerError:
            raise
        except Exception:
            log.exception("could not handle a message", extra={"data": {"message": type(message).__name__}})
            self._agent.metrics.loop_errors.labels("session").inc()
            self.connection.close()

    def _handle(self, message: EngineMessage) -> None:  # noqa: C901  # a flat list of what there is
        match message:
            case Hello():
                raise PeerError(WRONG_STATE, "a second Hello")
            case RegisterScheduler():
                checks.check_register_scheduler(message)
                self._require_engine().scheduler = message
                self._agent.registry.settle(self._require_engine())
            case RegisterWorker():
                checks.check_register_worker(message)
                self._require_engine().workers[self.hello.rank] = message
                self._agent.registry.settle(self._require_engine())
            case Prefetch():
                self._prefetch(message)
            case Release():
                self._release(message)
            case Reserve():
                self._reserve(message)
            case Ack():
                self._agent.acked(owner_of(self.hello.engine_id), message.job, self.hello.rank)
            case Abort():
                self._agent.store.abort(self._rank(), message.job, time.monotonic_ns())
            case Announce():
                self._announce(message)
            case GpuEvents():
                checks.check_gpu(message)
                self._agent.feed.gpu_events(self._require_engine().engine_id, message)
            case EngineLoad():
                checks.check_engine_load(message)
                self._agent.registry.loaded(self._require_engine(), message)
            case GpuSnapshot():
                checks.check_gpu(message)
                self._agent.feed.gpu_snapshot(self._require_engine().engine_id, message)
            case Unmapped():
                pass  # it was asked to before the arena was there, and has answered late
            case FileDigests():
                checks.check_file_digests(message)
                self.connection.send(self._agent.file_digests.answer(message))

    def _require_engine(self) -> Engine:
        if self.engine is None:
            raise PeerError(WRONG_STATE, "no Hello yet")
        return self.engine

    # --- lookups ----------------------------------------------------------------------------------------------------

    def _prefetch(self, message: Prefetch) -> None:
        engine = self._require_engine()
        if not engine.was_known:
            raise PeerError(WRONG_STATE, "Prefetch before the domain is known")
        checks.check_prefetch(message, engine.layouts)
        self._end_lookup(message.request)
        if engine.domain.state != KNOWN:
            self.connection.send(_all_miss(message))
            return
        lookup = Lookup(self._agent.lookup_services, engine.engine_id, message, engine.layouts, self.connection.send)
        if lookup.begin(may_wait=len(self._lookups) < LOOKUPS_MAX) or self.connection.closed:
            return
        task = self._agent.loop.create_task(self._finish(lookup, message), name=f"lookup {message.request}")
        self._lookups[message.request] = lookup, task

    async def _finish(self, lookup: Lookup, message: Prefetch) -> None:
        try:
            await lookup.finish()
        except Exception:
            log.exception("a lookup failed")
            self._agent.metrics.loop_errors.labels("lookup").inc()
            self.connection.send(_all_miss(message))
        finally:
            current = self._lookups.get(message.request)
            if current is not None and current[0] is lookup:
                del self._lookups[message.request]

    def _release(self, message: Release) -> None:
        for request in message.requests:
            self._end_lookup(request)
            self._agent.store.leases.release(self._require_engine().engine_id, request)

    def _end_lookup(self, request: str) -> None:
        lookup, task = self._lookups.pop(request, (None, None))
        if lookup is not None and task is not None:
            lookup.close()  # at once: the task hears of its end in a later round of the loop
            task.cancel()

    # --- stores -----------------------------------------------------------------------------------------------------

    def _rank(self) -> Rank:
        """Who this worker is and what its blocks measure."""
        hello = self.hello
        sizes = {layout.group: layout.payload_bytes for layout in self._require_engine().layouts.values()}
        return Rank(owner_of(hello.engine_id), hello.rank, hello.world_size, sizes)

    def _reserve(self, message: Reserve) -> None:
        engine = self._require_engine()
        if not engine.was_known:
            raise PeerError(WRONG_STATE, "Reserve before the domain is known")
        checks.check_reserve(message, engine.layouts)
        count = len(message.keys)
        if engine.domain.state != KNOWN:
            kinds = bytes([FULL]) * count
            self.connection.send(Reserved(message.rid, message.job, kinds, [0] * count, [0] * count, 0))
            return
        answer = self._agent.store.reserve(
            self._rank(),
            message.job,
            message.domain,
            message.keys,
            private=message.private,
            now_ns=time.monotonic_ns(),
        )
        if answer is None:
            raise PeerError(WRONG_KEYS, f"rank {self.hello.rank} reserves other keys for job {message.job}")
        self._count_reserved(answer.kinds)
        self.connection.send(
            Reserved(message.rid, message.job, answer.kinds, answer.slots, answer.generations, answer.write_until_ns)
        )

    def _count_reserved(self, kinds: bytes) -> None:
        for kind, name in ((SLOT, "slot"), (EXISTS, "exists"), (FULL, "full")):
            count = kinds.count(kind)
            if count:
                self._agent.metrics.reserved_blocks.labels(name).inc(count)

    # --- reconnecting -----------------------------------------------------------------------------------------------

    def _announce(self, message: Announce) -> None:
        checks.check_announce(message)
        hello = self.hello
        if hello.role == WORKER:
            self._agent.store.rank_done(owner_of(hello.engine_id), hello.rank, hello.world_size)
        else:
            self._agent.renew_leases(hello.engine_id, message)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _on_closed(self, error: PeerError | None) -> None:
        for request in list(self._lookups):
            self._end_lookup(request)
        if error is not None:
            self._agent.metrics.protocol_errors.labels(error.reason).inc()
            who = {"engine": self.hello.engine_id, "role": self.hello.role}
            data = {"connection": self.peer.number, "reason": error.reason, "detail": str(error), **who}
            log.warning("closed a connection", extra={"data": data})
        pidfd, self.peer.pidfd = self.peer.pidfd, None
        self._agent.registry.forget(self, pidfd)
        self._on_ended(self)


def _all_miss(message: Prefetch) -> Verdict:
    """A final verdict that offers nothing."""
    groups = []
    for keys in message.groups:
        count = len(keys.hashes)
        states = bytes([LOCAL]) * keys.local_blocks + bytes([MISS]) * (count - keys.local_blocks)
        groups.append(GroupVerdict(keys.group, states, bytes(count), [0] * count, [0] * count))
    return Verdict(message.rid, message.request, True, 0, groups)
