"""A listening Unix socket that exactly one process owns.

Invariant: the socket's path belongs to whoever holds the lock file beside it; a stale one is removed under that lock.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from kvpool_core.errors import KVPoolError

BACKLOG = 128
"""Connects waiting to be accepted: all engines of a node reconnect at once after a restart."""


class SocketBusyError(KVPoolError):
    """Another process serves this socket."""


class SocketLock:
    """An exclusive lock that ends with the process, however it ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock; SocketBusyError when another process has it."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise KVPoolError(f"cannot open the lock {path}: {error.strerror}: does the folder exist?") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise SocketBusyError(f"{path} is locked: another process serves this folder: stop it first") from error

    def release(self) -> None:
        """Give the lock back."""
        os.close(self._fd)


class UnixListener:
    """A bound, non-blocking listener; create one only while holding the lock of its path."""

    def __init__(self, path: Path, *, mode: int) -> None:
        """Remove a stale socket, bind and listen."""
        self._path = path
        try:
            self.socket = _bind(path, mode)
        except OSError as error:
            raise KVPoolError(f"cannot listen on {path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self.socket.close()
        with suppress(FileNotFoundError):
            self._path.unlink()


def _bind(path: Path, mode: int) -> socket.socket:
    with suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
