"""Memory and time for request bodies: a bound of the bytes held over all requests, and a thread for long ones.

Invariant: `held` is the sum of what shares took and have not given back, and never over the bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kvpool_core.errors import KVPoolError
from kvpool_router.request_body import RequestBody, parse_body

_PARSED_AT_ONCE_BYTES = 1 << 20
"""A longer body is parsed beside the loop, which helps between decodes: `request_body` bounds how long each may take."""


class NoRoomError(KVPoolError):
    """The bodies of requests in flight take all the room there is."""


class BodyRoom:
    """The room for bodies of all requests."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="body-parser")
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """One request's part, given back at the latest when the block ends."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            share.give_back()

    def take(self, count: int) -> None:
        """NoRoomError where `count` bytes more would be too many."""
        if self.held + count > self._max_bytes:
            raise NoRoomError(f"requests in flight hold {self.held} of max_bodies_bytes = {self._max_bytes}")
        self.held += count

    async def parse(self, raw: bytes, *, tenant: str, trust_client_salt: bool) -> RequestBody:
        """`parse_body`; long bodies one after another on a thread, so that only one's parts are in memory at a time."""

        def work() -> RequestBody:
            return parse_body(raw, tenant=tenant, trust_client_salt=trust_client_salt)

        if len(raw) <= _PARSED_AT_ONCE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class BodyShare:
    """What one request's body takes of the room."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._held = 0

    def take(self, count: int) -> None:
        """So many bytes more came; NoRoomError when there is no room for them."""
        self._room.take(count)
        self._held += count

    def give_back(self) -> None:
        """The body is not needed any more."""
        self._room.held -= self._held
        self._held = 0
