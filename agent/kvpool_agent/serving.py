"""From a configuration to an agent that serves, and back.

Invariant: engines are let in only when the arena is complete, the former agent's blocks are taken over and the holder
keeps our slot table.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from pathlib import Path

from kvpool_agent.admin import AdminState
from kvpool_agent.agent import Agent
from kvpool_agent.arena import Arena, ArenaFds
from kvpool_agent.config import Config
from kvpool_agent.holder_link import HolderLink, Wish
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.server import Server
from kvpool_agent.takeover import Takeover, decide, read_old_table
from kvpool_agent.unix_listener import SocketBusyError, SocketLock, UnixListener

SOCKET_MODE = 0o666
"""Engines run as arbitrary users; who may connect is decided by who can mount the folder."""
LOCK_RETRY_SECONDS = 0.5
FLUSH_SECONDS = 3.0
"""At SIGTERM, queued writes to Valkey get this long: the orderly way is /v1/drain before."""
STATE_PERIOD_SECONDS = 1.0

log = logging.getLogger("kvpool.agent")


async def serve(config: Config, state: AdminState, metrics: AgentMetrics, stop: asyncio.Event) -> None:
    """Get the arena, serve engines until `stop`, end in order."""
    work = asyncio.get_running_loop().create_task(_serve_until_cancelled(config, state, metrics), name="serve")
    stopped = asyncio.get_running_loop().create_task(stop.wait(), name="stop")
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    work.cancel()
    try:
        await work
    except asyncio.CancelledError:
        return


async def _serve_until_cancelled(config: Config, state: AdminState, metrics: AgentMetrics) -> None:
    state.waiting_for = "the lock of the socket folder: another agent serves it"
    lock = await _lock(config)
    boot_id = secrets.token_bytes(16)
    wish = Wish(config.ram.capacity_bytes, config.ram.huge_page_bytes)
    link = HolderLink(Path(config.holder_socket), wish, boot_id=boot_id)
    metrics.holder_connected.set_function(lambda: float(link.connected))
    try:
        state.waiting_for = "the holder"
        fds = await link.acquire()
        agent = _build_agent(config, fds, boot_id, metrics)
        state.waiting_for = "the holder to keep the slot table"
        await link.offer(agent.arena)
        await _serve_engines(config, agent, link, state)
    finally:
        link.close()
        lock.release()


async def _serve_engines(config: Config, agent: Agent, link: HolderLink, state: AdminState) -> None:
    agent.start()
    listener = UnixListener(config.socket_path, mode=SOCKET_MODE)
    server = Server(agent, listener)
    state.agent = agent
    log.info("serving", extra={"data": {"socket": str(config.socket_path), "boot_id": agent.boot_id.hex()}})
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(link.keep(agent.arena), name="holder")
            group.create_task(_watch_tier(agent), name="valkey state")
            group.create_task(agent.run(), name="agent")
    finally:
        server.close()
        listener.close()
        await agent.stop(FLUSH_SECONDS)


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


def _build_agent(config: Config, fds: ArenaFds, boot_id: bytes, metrics: AgentMetrics) -> Agent:
    arena = Arena(fds, boot_id=boot_id)
    agent = Agent(config, arena, boot_id=boot_id, metrics=metrics)
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
