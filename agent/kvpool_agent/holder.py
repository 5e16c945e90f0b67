"""The holder process: keeps the payload memfd and the latest slot table alive while agents come and go.

Invariant: at most one arena is kept, it is passed on only when every page of it is there, and nothing that a peer sends
or omits changes it, other than a well-formed HolderCreate or HolderKeep.
"""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from kvpool_agent.fd_socket import FrameReader, close_fds, send_frame
from kvpool_agent.kept_arena import KeptArena, adopt_arena, create_arena
from kvpool_agent.logs import set_up_logging
from kvpool_agent.unix_listener import SocketLock, UnixListener
from kvpool_core.errors import ArenaError, FrameError, KVPoolError
from kvpool_core.wire import HolderCreate, HolderHello, HolderKeep, HolderState, Refused, decode_holder_message, encode

SEND_TIMEOUT_SECONDS = 2.0
"""A peer that does not read a few hundred bytes within this is dropped, so that it cannot hang the holder."""
MAX_PEERS = 16
"""One agent, its predecessor and a curious operator; more is somebody's mistake."""

log = logging.getLogger("kvpool.holder")


@dataclass(slots=True)
class Peer:
    """A connection. `waiting`: it gets a HolderState after every step of the prefault and one at its end."""

    sock: socket.socket
    reader: FrameReader
    waiting: int | None = field(default=None)


class Holder:
    """Serves any number of agents from one thread."""

    def __init__(self, listener: UnixListener) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.socket, selectors.EVENT_READ)
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._peers: dict[socket.socket, Peer] = {}
        self._arena: KeptArena | None = None
        self._stopping = False

    def stop(self) -> None:
        """Have `run` end; from a signal handler, after which Python goes on with the wait that it interrupted."""
        self._stopping = True
        os.write(self._waker, b"x")

    def run(self) -> None:
        """Serve until `stop`; prefault between messages."""
        while not self._stopping:
            busy = self._arena is not None and not self._arena.complete
            for key, _events in self._selector.select(0 if busy else None):
                if key.fileobj is self._listener.socket:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._peers:
                    self._serve(self._peers[key.fileobj])
            if busy:
                self._prefault_step()

    def close(self) -> None:
        """Drop every peer and the arena."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._forget_arena()
        self._selector.close()
        self._listener.close()
        os.close(self._woken)
        os.close(self._waker)

    def _accept(self) -> None:
        try:
            sock, _address = self._listener.socket.accept()
        except OSError:
            return
        if len(self._peers) >= MAX_PEERS:
            log.warning("refused a connection: too many peers")
            sock.close()
            return
        sock.settimeout(SEND_TIMEOUT_SECONDS)
        self._peers[sock] = Peer(sock=sock, reader=FrameReader(sock))
        self._selector.register(sock, selectors.EVENT_READ)

    def _serve(self, peer: Peer) -> None:
        try:
            bodies = peer.reader.read()
            if bodies is None:
                self._drop(peer)
                return
            for body in bodies:
                self._answer(peer, body)
        except (FrameError, OSError) as error:
            log.warning("dropped a peer", extra={"data": {"reason": str(error)}})
            self._drop(peer)

    def _answer(self, peer: Peer, body: bytes) -> None:
        message = decode_holder_message(body)
        try:
            match message:
                case HolderHello(rid=rid):
                    self._send_state(peer, rid)
                case HolderCreate():
                    self._create(peer, message)
                case HolderKeep():
                    self._keep(peer, message)
                case _:
                    raise FrameError(f"a holder is not sent {type(message).__name__}")
        except ArenaError as error:
            log.warning("refused a request", extra={"data": {"reason": str(error)}})
            self._send(peer, Refused(message.rid, "ArenaUnavailable", str(error)), ())

    def _create(self, peer: Peer, message: HolderCreate) -> None:
        """The former arena goes: nobody can read both, and the node's memory is sized for one."""
        self._forget_arena()
        self._arena = create_arena(message.capacity_bytes, message.huge_page_bytes)
        log.info("creating an arena", extra={"data": {"capacity_bytes": message.capacity_bytes}})
        self._send_state(peer, message.rid)

    def _keep(self, peer: Peer, message: HolderKeep) -> None:
        fds = peer.reader.take_fds()
        try:
            if len(fds) != 1 + message.with_payload:
                raise ArenaError(f"HolderKeep brought {len(fds)} descriptors, not {1 + message.with_payload}")
            self._take(message, fds)
        except ArenaError:
            close_fds(fds)
            raise
        self._send_state(peer, message.rid)

    def _take(self, message: HolderKeep, fds: list[int]) -> None:
        if self._arena is not None and self._arena.arena_id != message.arena_id:
            raise ArenaError("another arena is kept already: ask with HolderHello")
        if self._arena is None:
            self._arena = adopt_arena(message, fds)
            log.info("took an arena from a living agent")
            return
        self._arena.replace_table(fds[-1])
        close_fds(fds[:-1])

    def _send_state(self, peer: Peer, rid: int) -> None:
        arena = self._arena
        if arena is None:
            self._send(peer, HolderState(rid, b"", 0, 0, 0, False), ())
            return
        fds = arena.descriptors()
        peer.waiting = None if fds else rid
        state = HolderState(
            rid,
            arena.arena_id,
            arena.capacity_bytes,
            arena.huge_page_bytes,
            arena.prefaulted_bytes,
            arena.table_fd is not None,
        )
        self._send(peer, state, fds)

    def _send(self, peer: Peer, message: HolderState | Refused, fds: tuple[int, ...]) -> None:
        try:
            send_frame(peer.sock, encode(message), fds)
        except OSError as error:
            log.info("a peer went away", extra={"data": {"reason": str(error)}})
            self._drop(peer)

    def _prefault_step(self) -> None:
        arena = self._arena
        if arena is None:
            return
        try:
            arena.prefault_step()
        except ArenaError as error:
            log.error("gave up the arena", extra={"data": {"reason": str(error)}})
            self._forget_arena()
            self._tell_waiting(Refused(0, "ArenaUnavailable", str(error)))
            return
        self._tell_waiting(None)
        if arena.complete:
            log.info("the arena is complete", extra={"data": {"capacity_bytes": arena.capacity_bytes}})

    def _tell_waiting(self, refused: Refused | None) -> None:
        for peer in list(self._peers.values()):
            if peer.waiting is None:
                continue
            if refused is None:
                self._send_state(peer, peer.waiting)
            else:
                self._send(peer, Refused(peer.waiting, refused.code, refused.message), ())
                peer.waiting = None

    def _drop(self, peer: Peer) -> None:
        if self._peers.pop(peer.sock, None) is None:
            return
        self._selector.unregister(peer.sock)
        peer.reader.close()
        peer.sock.close()

    def _forget_arena(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def main() -> int:
    """Entry point: `python -m kvpool_agent.holder --socket PATH`."""
    parser = argparse.ArgumentParser(
        prog="kvpool-holder", description="Keeps a node's arena alive across agent restarts."
    )
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to serve; its lock lies beside it")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    arguments = parser.parse_args()
    set_up_logging(arguments.log_level, {"component": "holder"})
    path: Path = arguments.socket
    try:
        lock = SocketLock(path.with_name(path.name + ".lock"))
        listener = UnixListener(path, mode=0o600)
    except KVPoolError as error:
        log.error("cannot start", extra={"data": {"reason": str(error)}})
        return 1
    holder = Holder(listener)

    def stop(_number: int, _frame: FrameType | None) -> None:
        holder.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    log.info("serving", extra={"data": {"socket": str(path), "pid": os.getpid()}})
    holder.run()
    holder.close()
    lock.release()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
