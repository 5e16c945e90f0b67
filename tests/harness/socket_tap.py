"""A Unix socket between an engine and its agent that lets a test act at an exact message.

Invariant: bytes and descriptors pass unchanged and in order; `on_message` runs before a message is passed on.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvpool_core import wire
from kvpool_core.frames import FrameDecoder, encode_frame

Hook = Callable[[wire.Message], None]


class SocketTap:
    """Listens at `path`, connects each client to `upstream`."""

    def __init__(self, path: Path, upstream: Path) -> None:
        self.path = path
        self.on_message: Hook | None = None
        self._upstream = upstream
        self._open: list[socket.socket] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, upstream: Path) -> None:
        """Connections end; who connects again finds another agent."""
        self._upstream = upstream
        connections, self._open = self._open, []
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept nobody any more."""
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One connection to its end."""
        with client, socket.socket(socket.AF_UNIX) as agent:
            try:
                agent.connect(str(self._upstream))
            except OSError:
                return
            self._open += [client, agent]
            back = threading.Thread(target=self._pass_on, args=(agent, client, wire.decode_agent_message), daemon=True)
            back.start()
            self._pass_on(client, agent, wire.decode_engine_message)
            back.join()
            self._open = [connection for connection in self._open if connection not in (client, agent)]

    def _pass_on(self, source: socket.socket, target: socket.socket, decode: Callable[[bytes], wire.Message]) -> None:
        decoder = FrameDecoder()
        with suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(source, 1 << 16, 4)
                if not data:
                    break
                for body in decoder.feed(data):
                    if self.on_message is not None:
                        self.on_message(decode(body))
                    self._send(target, encode_frame(body), descriptors)
                    descriptors = []
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _send(target: socket.socket, frame: bytes, descriptors: list[int]) -> None:
        if descriptors:
            sent = socket.send_fds(target, [frame], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            target.sendall(frame[sent:])
        else:
            target.sendall(frame)
