"""One engine process's connection: frames in and out on a non-blocking socket.

Invariant: memory for a peer is bounded in both directions (one frame in, a small one until it is welcome, SEND_MAX_BYTES
out); what exceeds it ends the connection, never the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvpool_agent.peer_error import FRAME_TOO_LONG, SLOW_READER, TRUNCATED, PeerError
from kvpool_core.errors import FrameError
from kvpool_core.frames import MAX_FRAME_BYTES, FrameDecoder
from kvpool_core.wire import Message, encode

READ_BYTES = 256 * 1024
GUEST_FRAME_BYTES = 256 * 1024
"""Until a session takes the connection over: Hello with its token and names. Anybody can connect, and many at a time."""
SEND_MAX_BYTES = 32 << 20
"""Unread bytes for one peer: a few of the largest verdicts."""
SO_PEERPIDFD = 77
"""Linux 6.5: a descriptor of the peer's process, free of the races of its number."""
_UCRED = struct.Struct("3i")

log = logging.getLogger("kvpool.agent.connection")


class Connection:
    """on_frame(body) and on_closed(error or None) are called on the loop; PeerError from on_frame closes it."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = loop
        self._decoder = FrameDecoder(GUEST_FRAME_BYTES)
        self._backlog = bytearray()
        self._on_frame: Callable[[bytes], None] = lambda _body: None
        self._on_closed: Callable[[PeerError | None], None] = lambda _error: None
        self.closed = False

    def start(self, on_frame: Callable[[bytes], None], on_closed: Callable[[PeerError | None], None]) -> None:
        """Begin to read, for a guest."""
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._loop.add_reader(self._socket, self._readable)

    def hand_over(self, on_frame: Callable[[bytes], None], on_closed: Callable[[PeerError | None], None]) -> None:
        """The peer is welcome: from the next frame on its session is told."""
        self._decoder.limit_bytes = MAX_FRAME_BYTES
        self._on_frame = on_frame
        self._on_closed = on_closed

    def peer_pidfd(self) -> int | None:
        """A descriptor that becomes readable when the peer's process ends; None when that cannot be known."""
        with suppress(OSError):
            return self._socket.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        with suppress(OSError):
            credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, _uid, _gid = _UCRED.unpack(credentials)
            return os.pidfd_open(pid) if pid > 0 else None
        return None

    def peer_pid(self) -> int:
        """Number of the peer's process, 0 where it cannot be seen."""
        with suppress(OSError):
            credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            return int(_UCRED.unpack(credentials)[0])
        return 0

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send now if the socket has room, else queue; descriptors only before anything else was sent."""
        if self.closed:
            return
        try:
            frame = encode(message)
        except FrameError as error:  # an answer larger than a frame: the question was too large
            self.fail(PeerError(FRAME_TOO_LONG, str(error)))
            return
        sent = 0
        if not self._backlog:
            sent = self._send_now(frame, fds)
        if sent < len(frame) and not self.closed:
            self._queue(frame[sent:])

    def fail(self, error: PeerError) -> None:
        """The peer did something wrong."""
        self._close(error)

    def close(self) -> None:
        """End the connection."""
        self._close(None)

    def _send_now(self, frame: bytes, fds: Sequence[int]) -> int:
        try:
            return socket.send_fds(self._socket, [frame], fds) if fds else self._socket.send(frame)
        except BlockingIOError:
            return 0
        except OSError:
            self._close(None)
            return len(frame)

    def _queue(self, data: bytes) -> None:
        if len(self._backlog) + len(data) > SEND_MAX_BYTES:
            self.fail(PeerError(SLOW_READER, f"{len(self._backlog)} bytes are waiting to be read"))
            return
        if not self._backlog:
            self._loop.add_writer(self._socket, self._writable)
        self._backlog += data

    def _writable(self) -> None:
        try:
            sent = self._socket.send(self._backlog)
        except BlockingIOError:
            return
        except OSError:
            self._close(None)
            return
        del self._backlog[:sent]
        if not self._backlog:
            self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            cut = self._decoder.pending_bytes
            self._close(PeerError(TRUNCATED, f"the stream ended {cut} bytes into a frame") if cut else None)
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            for body in self._decoder.feed(data):
                if self.closed:
                    return
                self._on_frame(body)
        except PeerError as error:
            self._close(error)
        except FrameError as error:
            self._close(PeerError(FRAME_TOO_LONG, str(error)))

    def _close(self, error: PeerError | None) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._on_closed(error)
