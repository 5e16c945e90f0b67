"""The few pieces of ASGI that the proxy speaks itself, so that answers pass piece by piece.

Invariant: when the client leaves, the work for it is cancelled at its next await and `ClientLeftError` is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.types import Receive, Send

from kvpool_core.errors import KVPoolError
from kvpool_router.body_room import BodyShare


class ClientLeftError(KVPoolError):
    """The client closed its connection."""


class BodyTooLargeError(KVPoolError):
    """The request's body is over the limit."""


class BodyTooSlowError(KVPoolError):
    """The request's body did not come in time."""


async def read_body(receive: Receive, *, max_bytes: int, seconds: float, share: BodyShare) -> bytes:
    """The whole request body, its bytes taken from `share`.

    BodyTooLargeError beyond `max_bytes`, BodyTooSlowError after `seconds`, NoRoomError when the share cannot grow,
    ClientLeftError when the client leaves.
    """
    try:
        async with asyncio.timeout(seconds):
            return await _read_pieces(receive, max_bytes, share)
    except TimeoutError:
        raise BodyTooSlowError(f"the request body did not come within {seconds:g} s") from None


async def _read_pieces(receive: Receive, max_bytes: int, share: BodyShare) -> bytes:
    pieces: list[bytes] = []
    held = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError("the client left while sending its request")
        piece: bytes = message.get("body", b"")
        held += len(piece)
        if held > max_bytes:
            raise BodyTooLargeError(f"the request body is over {max_bytes} bytes")
        share.take(len(piece))
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


@asynccontextmanager
async def until_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Run the block; ClientLeftError in it as soon as the client closes its connection."""
    task = asyncio.current_task()
    assert task is not None
    watch = _Watch(task)
    watcher = asyncio.create_task(_wait_for_disconnect(receive), name="client-watch")
    watcher.add_done_callback(watch.on_done)
    try:
        yield
    except asyncio.CancelledError:
        if watch.left and task.uncancel() == 0:
            raise ClientLeftError("the client left") from None
        raise
    finally:
        watch.over = True
        watcher.cancel()


class _Watch:
    """Cancels the task once when the client left, unless its work is over."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self.left = False
        self.over = False

    def on_done(self, watcher: asyncio.Task[None]) -> None:
        if self.over or watcher.cancelled():
            return
        watcher.exception()
        self.left = True
        self._task.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    """Send status and headers."""
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_piece(send: Send, piece: bytes, *, more: bool) -> None:
    """Send a piece of the body."""
    await send({"type": "http.response.body", "body": piece, "more_body": more})


async def send_json(send: Send, status: int, content: object, headers: list[tuple[bytes, bytes]]) -> None:
    """Send a whole JSON answer."""
    body = msgspec.json.encode(content)
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send_start(send, status, fixed + headers)
    await send_piece(send, body, more=False)
