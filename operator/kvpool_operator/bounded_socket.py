"""A TCP connection to a process that is not trusted to answer.

Invariant: between two grants it takes at most the granted seconds and gives at most the granted bytes, however slowly or
however much the other side sends. So a reader that waits for more than comes is ended by an OSError. And it sends nothing that
its thread's fence (`fence.sending_under`) no longer lets through.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from kvpool_operator.fence import check_before_send

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class BoundedSocket(socket.socket):
    """A connected socket; without a grant it does nothing."""

    _deadline = 0.0
    _bytes_left = 0

    @classmethod
    def take_over(cls, plain: socket.socket) -> BoundedSocket:
        """Of a socket that is used no more."""
        return cls(plain.family, plain.type, plain.proto, fileno=plain.detach())

    def grant(self, *, deadline: float, max_bytes: int) -> None:
        """What follows must end by `deadline` (monotonic) and may receive `max_bytes`."""
        self._deadline, self._bytes_left = deadline, max_bytes

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """As a socket does, within the grant."""
        self._limit()
        data = super().recv(bufsize, flags)
        self._count(len(data))
        return data

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0, /) -> int:
        """As a socket does, within the grant."""
        self._limit()
        count = super().recv_into(buffer, nbytes, flags)
        self._count(count)
        return count

    def sendall(self, data: ReadableBuffer, flags: int = 0, /) -> None:
        """As a socket does, within the grant and behind the fence."""
        self._limit()
        check_before_send()
        super().sendall(data, flags)

    def _limit(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time is up")
        self.settimeout(left)

    def _count(self, received: int) -> None:
        self._bytes_left -= received
        if self._bytes_left < 0:
            raise OSError("the answer is too long")
