"""Frames on the agent's socket and in event streams: u32 little-endian length, then one msgpack value.

Invariant: a decoder never holds more than one frame's limit of undecoded bytes, and never returns part of a frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from kvpool_core.errors import FrameError

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Upper bound of a frame's body: a Prefetch of 100,000 blocks is 3.5 MB."""

_LENGTH = struct.Struct("<I")


def encode_frame(body: bytes) -> bytes:
    """Length prefix and body; FrameError when the body is longer than MAX_FRAME_BYTES."""
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}: split the batch")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream into frame bodies. `limit_bytes`: of a body, from now on."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield each complete body; FrameError on a length over the limit (the stream is then unusable)."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.limit_bytes:
                raise FrameError(f"frame of {length} bytes is over the limit of {self.limit_bytes}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body

    @property
    def pending_bytes(self) -> int:
        """Bytes of an incomplete frame; not 0 at the end of a stream means that it was truncated."""
        return len(self._buffer)
