"""From a configuration to an agent that serves, and back.

Invariant: engines may connect from the start, and are welcomed when the arena is complete, the former agent's blocks are
taken over and the holder keeps our slot table; a new arena is made only when there is room for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

from kvpool_agent.admin import AdminState
from kvpool_agent.agent import Agent
from kvpool_agent.arena import Arena, ArenaFds
from kvpool_agent.arena_room import CONNECT_SECONDS, LastArena
from kvpool_agent.authentication import Authenticator
from kvpool_agent.config import Config
from kvpool_agent.holder_link import HolderLink, Wish
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.pod_identity import audience_of
from kvpool_agent.room_keeper import RoomKeeper
from kvpool_agent.server import Server
from kvpool_agent.takeover import Takeover, decide, read_old_table
from kvpool_agent.token_review import TokenReviews
from kvpool_agent.unix_listener import SocketBusyError, SocketLock, UnixListener
from kvpool_core.kube_client import load_client
from kvpool_core.namespace_file import NamespaceFile

SOCKET_MODE = 0o666
"""Engines run as arbitrary users; who may connect is decided by who can mount the folder, and by their tokens."""
LOCK_RETRY_SECONDS = 0.5
STATE_PERIOD_SECONDS = 1.0
NAMESPACES_PERIOD_SECONDS = 1.0
STOP_SECONDS = 3.0
"""After draining: to finish what is under way."""

log = logging.getLogger("kvpool.agent")


async def serve(config: Config, state: AdminState, metrics: AgentMetrics, stop: asyncio.Event) -> None:
    """Get the arena, serve engines until `stop`, drain, end in order."""
    loop = asyncio.get_running_loop()
    work = loop.create_task(_serve_until_cancelled(config, state, metrics), name="serve")
    stopped = loop.create_task(stop.wait(), name="stop")
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stop.is_set() and state.agent is not None and not work.done():
        state.stopping = True
        drained = await state.agent.drain(config.drain_seconds)
        log.info("drained" if drained else "stopping with blocks that are not written to Valkey")
    work.cancel()
    try:
        await work
    except asyncio.CancelledError:
        return


async def _serve_until_cancelled(config: Config, state: AdminState, metrics: AgentMetrics) -> None:
    state.arena.wait("the lock of the socket folder: another agent serves it")
    lock = await _lock(config)
    try:
        await _serve_folder(config, state, metrics)
    finally:
        lock.release()


async def _serve_folder(config: Config, state: AdminState, metrics: AgentMetrics) -> None:
    wish = Wish(config.ram.capacity_bytes, config.ram.huge_page_bytes)
    link = HolderLink(Path(config.holder_socket), wish, boot_id=state.boot_id)
    metrics.holder_connected.set_function(lambda: float(link.connected))
    authenticator = await _build_authenticator(config, metrics)
    listener = UnixListener(config.socket_path, mode=SOCKET_MODE)
    loop = asyncio.get_running_loop()
    server = Server(listener, loop=loop, metrics=metrics, authenticator=authenticator)
    _show_guests(server, metrics)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(server.keep_guests(), name="guests")
            if authenticator is not None:
                group.create_task(_watch_namespaces(authenticator, server), name="namespaces")
            await _serve_engines(config, link, server, state, metrics)
    finally:
        server.close()
        listener.close()
        link.close()
        if authenticator is not None:
            authenticator.close()


async def _serve_engines(
    config: Config, link: HolderLink, server: Server, state: AdminState, metrics: AgentMetrics
) -> None:
    state.arena.wait("the holder")
    last = LastArena(Path(config.socket_folder))
    room = RoomKeeper(link.wish, server, state.arena, last, asyncio.get_running_loop().time() + CONNECT_SECONDS)
    fds = await link.acquire(room)
    agent = _build_agent(config, fds, state, metrics)
    state.arena.wait("the holder to keep the slot table")
    await link.offer(agent.arena)
    _note(last, agent.arena.arena_id)
    agent.start()
    state.open(agent)
    server.open(agent)
    socket = str(config.socket_path)
    log.info("serving", extra={"data": {"socket": socket, "boot_id": agent.boot_id.hex()}})
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(link.keep(agent.arena), name="holder")
            group.create_task(_watch_tier(agent), name="valkey state")
            group.create_task(agent.run(), name="agent")
    finally:
        server.close()
        await agent.stop(STOP_SECONDS)


def _note(last: LastArena, arena_id: bytes) -> None:
    try:
        last.write(arena_id)
    except OSError as error:
        log.warning(
            "could not note the arena; a successor may not wait for engines", extra={"data": {"reason": str(error)}}
        )


async def _build_authenticator(config: Config, metrics: AgentMetrics) -> Authenticator | None:
    """Ready to ask: an engine that connects waits 5 s for its Welcome, not for our imports."""
    if config.authentication == "none":
        return None
    await asyncio.to_thread(load_client)
    return Authenticator(
        TokenReviews().review,
        audience=audience_of(config.pool.namespace, config.pool.name),
        namespaces=NamespaceFile(Path(config.allowed_namespaces_file)),
        metrics=metrics,
    )


async def _watch_namespaces(authenticator: Authenticator, server: Server) -> None:
    while True:
        await asyncio.sleep(NAMESPACES_PERIOD_SECONDS)
        if authenticator.refresh_namespaces():
            log.info("the allowed namespaces changed")
            server.recheck()


def _show_guests(server: Server, metrics: AgentMetrics) -> None:
    metrics.standing_by.labels("true").set_function(lambda: len(server.mapping_guests()))
    metrics.standing_by.labels("false").set_function(lambda: server.guests - len(server.mapping_guests()))


async def _lock(config: Config) -> SocketLock:
    """Wait until no other agent serves the folder: in a rolling replacement two overlap for a moment."""
    told = False
    while True:
        try:
            return SocketLock(Path(config.socket_folder) / "agent.lock")
        except SocketBusyError as error:
            if not told:
                log.warning("waiting for the lock", extra={"data": {"reason": str(error)}})
                told = True
            await asyncio.sleep(LOCK_RETRY_SECONDS)


def _build_agent(config: Config, fds: ArenaFds, state: AdminState, metrics: AgentMetrics) -> Agent:
    arena = Arena(fds, boot_id=state.boot_id)
    agent = Agent(config, arena, boot_id=state.boot_id, metrics=metrics)
    takeover = _read_takeover(fds)
    metrics.takeovers.labels("new" if takeover is None else "taken_over").inc()
    if takeover is not None:
        agent.take_over(takeover)
    return agent


def _read_takeover(fds: ArenaFds) -> Takeover | None:
    if fds.old_table_fd is None:
        return None
    try:
        records = read_old_table(fds.old_table_fd, fds.arena_id)
        return None if records is None else decide(records, time.monotonic_ns())
    finally:
        os.close(fds.old_table_fd)


async def _watch_tier(agent: Agent) -> None:
    """Log each change of the Valkey tier's state once, and show it as a metric."""
    former = ""
    while agent.tier is not None:
        state = str(agent.tier.stats()["state"])
        if state != former:
            log.info("Valkey tier", extra={"data": {"state": state}})
            if former:
                agent.metrics.valkey_state.labels(former).set(0)
            agent.metrics.valkey_state.labels(state).set(1)
            former = state
        await asyncio.sleep(STATE_PERIOD_SECONDS)
