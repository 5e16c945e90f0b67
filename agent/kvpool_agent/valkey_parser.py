# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
"""A RESP2 parser for valkey-py that receives large values straight into a buffer of their size.

valkey-py's own parsers copy a value three times (0.2 to 0.8 GB/s on the machine where this one gives 1 to 2); parsers
are what it lets one choose. Invariants: after an exception nothing is known of the stream's position, and valkey-py
closes the connection; whatever the other side sends, memory for a reply is bounded and the exception is valkey-py's.
"""

from __future__ import annotations

import select
import socket
from typing import Protocol

import valkey
from valkey.cluster import ClusterParser
from valkey.exceptions import InvalidResponse, ValkeyError

RECEIVE_BYTES = 16 * 1024
"""Received at once while looking for a line; what belongs to a large value is then copied once more."""
MAX_LINE_BYTES = 64 * 1024
MAX_BULK_BYTES = 512 << 20
"""Valkey's own limit for a value."""
MAX_ITEMS = 1 << 20
MAX_DEPTH = 32
"""CLUSTER SLOTS has lists of lists of lists."""
CLOSED = "Connection closed by server."

Parsed = bytes | bytearray | int | None | list["Parsed"] | ValkeyError


class _Connected(Protocol):
    _sock: socket.socket


class LargeValueParser(ClusterParser):
    """Takes valkey-py's error classes from ClusterParser, and nothing else. Bulk strings come as bytes or bytearray."""

    def __init__(self, socket_read_size: int) -> None:  # noqa: ARG002 (valkey-py's signature)
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._position = 0

    def on_connect(self, connection: _Connected) -> None:
        """A connection was made."""
        self._socket = connection._sock
        self._buffer, self._position = b"", 0

    def on_disconnect(self) -> None:
        """The connection is closed."""
        self._socket = None
        self._buffer, self._position = b"", 0

    def can_read(self, timeout: float) -> bool:
        """Whether bytes or the end of the stream are there; waits at most `timeout` seconds."""
        if self._position < len(self._buffer):
            return True
        poll = select.poll()
        poll.register(self._open_socket(), select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def read_response(self, disable_decoding: bool = False) -> Parsed:  # noqa: ARG002 (nothing is decoded here)
        """One reply; error replies are returned, those that end the connection are raised."""
        return self._read(0)

    def _read(self, depth: int) -> Parsed:
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._read_bulk(_number(rest, MAX_BULK_BYTES))
        if kind == b":":
            return _number(rest, 2**64)
        if kind == b"+":
            return rest
        if kind == b"*" and depth < MAX_DEPTH:
            return None if rest == b"-1" else [self._read(depth + 1) for _ in range(_number(rest, MAX_ITEMS))]
        if kind == b"-":
            return self._error(rest)
        raise InvalidResponse(f"Protocol Error: {line[:80]!r}")

    def _error(self, text: bytes) -> ValkeyError:
        error: ValkeyError = self.parse_error(text.decode(errors="replace"))
        if isinstance(error, valkey.ConnectionError):
            raise error
        return error

    def _read_bulk(self, size: int) -> bytes | bytearray | None:
        if size < 0:
            return None
        at_hand = self._buffer[self._position : self._position + size]
        self._position += len(at_hand)
        value: bytes | bytearray = at_hand
        if len(at_hand) < size:
            value = bytearray(size)
            value[: len(at_hand)] = at_hand
            self._receive_rest(memoryview(value)[len(at_hand) :])
        self._read_line()
        return value

    def _receive_rest(self, target: memoryview) -> None:
        receiver = self._open_socket()
        received = 0
        while received < len(target):
            count = receiver.recv_into(target[received:])
            if not count:
                raise valkey.ConnectionError(CLOSED)
            received += count

    def _read_line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._position)) < 0:
            if len(self._buffer) - self._position > MAX_LINE_BYTES:
                raise InvalidResponse(f"Protocol Error: a line of more than {MAX_LINE_BYTES} bytes")
            more = self._open_socket().recv(RECEIVE_BYTES)
            if not more:
                raise valkey.ConnectionError(CLOSED)
            self._buffer = self._buffer[self._position :] + more
            self._position = 0
        line = self._buffer[self._position : end]
        self._position = end + 2
        return line

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise valkey.ConnectionError(CLOSED)
        return self._socket


def _number(text: bytes, limit: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = limit + 1
    if abs(number) > limit:
        raise InvalidResponse(f"Protocol Error: {text[:80]!r} is no number up to {limit}")
    return number
