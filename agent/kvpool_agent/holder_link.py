"""The agent's connection to its holder.

Invariant: an arena taken from the holder stays usable when the holder dies; the link then offers it to the next holder.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from kvpool_agent.arena import Arena, ArenaFds
from kvpool_agent.fd_socket import FrameReader, close_fds, send_frame
from kvpool_core.errors import FrameError
from kvpool_core.wire import (
    HolderCreate,
    HolderHello,
    HolderKeep,
    HolderState,
    Message,
    Refused,
    decode_holder_message,
    encode,
)

BACKOFF_FIRST_SECONDS = 0.1
BACKOFF_CAP_SECONDS = 5.0
"""A holder restarts within seconds; asking it more often gains nothing."""
REPLY_TIMEOUT_SECONDS = 30.0
"""Longest silence of a holder that was asked: a step of the prefault takes a tenth of a second."""

log = logging.getLogger("kvpool.agent.holder")

_T = TypeVar("_T")


class HolderLostError(Exception):
    """The connection ended, the holder refused or it answered nonsense: try again."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The arena that the configuration asks for."""

    capacity_bytes: int
    huge_page_bytes: int

    def fits(self, state: HolderState) -> bool:
        """Whether the kept arena is the one wished for."""
        kept = (state.capacity_bytes, state.huge_page_bytes)
        return bool(state.arena_id) and kept == (self.capacity_bytes, self.huge_page_bytes)


class Progress(Protocol):
    """Who is told how far the arena is, and has a say in when it is made."""

    async def make_room(self, kept_bytes: int) -> None:
        """Return when a new arena may be made; kept_bytes: pages of another one that the holder then frees."""

    def progressed(self, arena_id: bytes, prefaulted_bytes: int) -> None:
        """The holder has this arena, with so much of its memory."""

    def failed(self, reason: str) -> None:
        """The holder is away or refused; it is asked again."""


class HolderLink:
    """Gets the arena, then keeps the connection up as long as the agent lives."""

    def __init__(self, path: Path, wish: Wish, *, boot_id: bytes) -> None:
        self._path = path
        self.wish = wish
        self._boot_id = boot_id
        self._session: _Session | None = None
        self._told = ""

    @property
    def connected(self) -> bool:
        """Whether a holder keeps our arena right now."""
        return self._session is not None

    async def acquire(self, progress: Progress) -> ArenaFds:
        """Wait for a holder and get a complete arena of the wished size from it."""
        return await self._retry(lambda session: self._acquire_once(session, progress), on_failed=progress.failed)

    async def offer(self, arena: Arena) -> None:
        """Wait until the holder keeps our table (and, a new one, everything)."""
        await self._retry(lambda session: self._offer(session, arena))

    async def keep(self, arena: Arena) -> None:
        """Watch the holder for ever; after a loss, offer everything to the next one."""
        while True:
            await self._watch()
            await self.offer(arena)

    def close(self) -> None:
        """End the connection; the holder keeps what it has."""
        if self._session is not None:
            self._session.close()
            self._session = None

    async def _retry(
        self, action: Callable[[_Session], Awaitable[_T]], on_failed: Callable[[str], None] = lambda _reason: None
    ) -> _T:
        """Connect and act until it works, logging a reason once until it changes."""
        delay = BACKOFF_FIRST_SECONDS
        while True:
            try:
                if self._session is None:
                    self._session = _Session(self._path)
                result = await action(self._session)
                self._told = ""
                return result
            except (HolderLostError, OSError, FrameError) as error:
                self.close()
                reason = str(error) or type(error).__name__
                on_failed(reason)
                self._tell(reason)
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))
            delay = min(delay * 2, BACKOFF_CAP_SECONDS)

    def _tell(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            log.warning("waiting for the holder", extra={"data": {"socket": str(self._path), "reason": reason}})

    async def _acquire_once(self, session: _Session, progress: Progress) -> ArenaFds:
        state, fds = await session.ask(HolderHello(1, self._boot_id))
        if not self.wish.fits(state):
            close_fds(fds)
            await progress.make_room(state.prefaulted_bytes)
            log.info("asking the holder for a new arena", extra={"data": {"kept_bytes": state.capacity_bytes}})
            state, fds = await session.ask(HolderCreate(2, self.wish.capacity_bytes, self.wish.huge_page_bytes))
        while not fds:
            progress.progressed(state.arena_id, state.prefaulted_bytes)
            state, fds = await session.receive(REPLY_TIMEOUT_SECONDS)
        if not self.wish.fits(state) or len(fds) != 1 + state.has_table:
            close_fds(fds)
            raise HolderLostError("the holder passed another arena than it was asked for")
        progress.progressed(state.arena_id, state.prefaulted_bytes)
        old_table_fd = fds[1] if state.has_table else None
        return ArenaFds(state.arena_id, state.capacity_bytes, state.huge_page_bytes, fds[0], old_table_fd)

    async def _offer(self, session: _Session, arena: Arena) -> None:
        state, fds = await session.ask(HolderHello(1, self._boot_id))
        close_fds(fds)
        if state.arena_id and state.arena_id != arena.arena_id:
            raise HolderLostError("the holder keeps another arena: restart it to let it take ours")
        with_payload = not state.arena_id
        keep = HolderKeep(2, arena.arena_id, arena.capacity_bytes, arena.huge_page_bytes, with_payload)
        offered = (arena.payload_fd, arena.table_fd) if with_payload else (arena.table_fd,)
        state, fds = await session.ask(keep, offered)
        close_fds(fds)

    async def _watch(self) -> None:
        """Return when the connection has ended."""
        session = self._session
        if session is None:
            return
        try:
            _state, fds = await session.receive(None)
            close_fds(fds)
            reason = "it sent what nobody asked for"
        except (HolderLostError, OSError, FrameError) as error:
            reason = str(error)
        self.close()
        log.warning("lost the holder; offering the arena to the next one", extra={"data": {"reason": reason}})


class _Session:
    """One connection: a question at a time."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._bodies: list[bytes] = []
        self._reader = FrameReader(self._socket)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    async def ask(self, message: Message, fds: tuple[int, ...] = ()) -> tuple[HolderState, list[int]]:
        """Send and wait for the answer with its descriptors."""
        send_frame(self._socket, encode(message), fds)
        return await self.receive(REPLY_TIMEOUT_SECONDS)

    async def receive(self, timeout_seconds: float | None) -> tuple[HolderState, list[int]]:
        """The next HolderState; HolderLostError when there is none."""
        while not self._bodies:
            await self._readable(timeout_seconds)
            try:
                bodies = self._reader.read()
            except BlockingIOError:
                continue
            if bodies is None:
                raise HolderLostError("the holder closed the connection")
            self._bodies = bodies
        message = decode_holder_message(self._bodies.pop(0))
        if isinstance(message, Refused):
            raise HolderLostError(f"the holder refused: {message.message}")
        if not isinstance(message, HolderState):
            raise HolderLostError(f"the holder sent {type(message).__name__}")
        return message, self._reader.take_fds() if not self._bodies else []

    async def _readable(self, timeout_seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._socket, lambda: None if ready.done() else ready.set_result(None))
        try:
            await asyncio.wait_for(ready, timeout_seconds)
        except TimeoutError as error:
            raise HolderLostError(f"the holder was silent for {timeout_seconds} s") from error
        finally:
            loop.remove_reader(self._socket)

    def close(self) -> None:
        """End the connection and close descriptors that nobody took."""
        self._reader.close()
        self._socket.close()
