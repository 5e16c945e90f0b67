"""Frames with file descriptors (SCM_RIGHTS) on blocking or non-blocking Unix sockets.

Invariant: every descriptor that arrived is either in the caller's hands or closed; none leaks with a dropped peer.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence

from kvpool_core.errors import FrameError
from kvpool_core.frames import FrameDecoder

MAX_FDS = 4
"""Descriptors accepted with one read: HolderKeep brings two."""
READ_BYTES = 64 * 1024


class FrameReader:
    """Cuts what arrives on a socket into frame bodies and collects the descriptors that came along."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = FrameDecoder()
        self._fds: list[int] = []

    def read(self) -> list[bytes] | None:
        """Bodies completed by one receive; None at end of stream. FrameError, OSError and BlockingIOError pass through."""
        data, fds, _flags, _address = socket.recv_fds(self._sock, READ_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        self._fds += fds
        if len(self._fds) > MAX_FDS:
            raise FrameError(f"{len(self._fds)} descriptors arrived where at most {MAX_FDS} belong to a message")
        if not data:
            return None
        return list(self._decoder.feed(data))

    def take_fds(self) -> list[int]:
        """The descriptors received since the last call; the caller owns them."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        """Close descriptors that nobody took."""
        close_fds(self.take_fds())


def close_fds(fds: Iterable[int]) -> None:
    """Close each descriptor."""
    for fd in fds:
        os.close(fd)


def send_frame(sock: socket.socket, frame: bytes, fds: Sequence[int] = ()) -> None:
    """Send one small frame whole on a socket that blocks or has room; OSError when the peer is gone or does not read."""
    sent = socket.send_fds(sock, [frame], fds) if fds else 0
    sock.sendall(frame[sent:])
