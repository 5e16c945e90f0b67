"""A server that answers a byte now and then and never ends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

PAUSE_SECONDS = 0.05


@contextlib.contextmanager
def dripping(start: bytes, *, replies_first: int = 0, drip: bytes = b"a") -> Iterator[int]:
    """Its port. Says +OK to the first packets, then `start`, then `drip` for ever."""
    stop = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(PAUSE_SECONDS)

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            for _ in range(replies_first):
                connection.recv(65536)
                connection.sendall(b"+OK\r\n")
            connection.recv(65536)
            connection.sendall(start)
            while not stop.wait(PAUSE_SECONDS):
                connection.sendall(drip)

    def accept() -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                thread = threading.Thread(target=serve, args=(listening.accept()[0],))
                thread.start()
                threads.append(thread)

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield listening.getsockname()[1]
    finally:
        stop.set()
        for thread in threads:
            thread.join(5)
        listening.close()
