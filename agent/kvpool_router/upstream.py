"""One request to one engine, up to the first piece of its answer's body.

Invariant: until `open_upstream` returns, nothing has reached the client, so that another endpoint may still be tried.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from kvpool_core.errors import KVPoolError

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}

_SENT_AT_ONCE_BYTES = 1 << 20
"""aiohttp warns beyond: one write of a longer body holds up the loop."""

Headers = Iterable[tuple[bytes, bytes]]


REFUSED: Final = "refused"
"""Nobody listens there."""
BROKEN: Final = "broken"
"""The connection was reset or closed."""
SILENT: Final = "silent"
"""No answer yet, nor one to the last probes, while another endpoint is up: it gets the request, the connection is closed."""
LATE: Final = "late"
"""Nothing came within the idle timeout: the engine has the request and lives, another must not get it too."""


class UpstreamError(KVPoolError):
    """The engine gave no answer, or no whole one; `cause` is one of the constants above."""

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """An answer that began: `first` is the first piece of its body, b"" when the body is empty."""

    response: aiohttp.ClientResponse
    first: bytes

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers for the client, lower case."""
        lowered = [(name.lower(), value) for name, value in self.response.raw_headers]
        dropped = _HOP_BY_HOP | _named_by_connection(lowered)
        return [(name, value) for name, value in lowered if name not in dropped]

    async def next_piece(self) -> bytes:
        """The next piece as it arrives, b"" at the end; UpstreamError when the engine broke the answer off."""
        try:
            return await self.response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _translated(error) from error


def forwarded_headers(headers: Headers, *, dropped: Iterable[bytes]) -> CIMultiDict[str]:
    """The client's headers (lower case) as the engine gets them, without `dropped`."""
    received = list(headers)
    left_out = _NOT_FORWARDED | _named_by_connection(received) | set(dropped)
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in received:
        if name not in left_out:
            kept.add(name.decode("latin-1"), value.decode("latin-1"))
    return kept


async def open_upstream(
    session: aiohttp.ClientSession,
    url: URL,
    *,
    method: str,
    headers: CIMultiDict[str],
    body: bytes,
    silence_seconds: float,
) -> UpstreamAnswer:
    """Send the request and wait for the first piece of the answer's body; UpstreamError when there is none.

    silence_seconds: longest wait for each piece, the first one too.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=session.timeout.sock_connect, sock_read=silence_seconds)
    try:
        data = sendable(body)
        response = await session.request(
            method, url, headers=headers, data=data, allow_redirects=False, timeout=timeout
        )
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _translated(error) from error
    try:
        first = await response.content.readany()
    except BaseException as error:
        response.close()
        if isinstance(error, (aiohttp.ClientError, OSError, TimeoutError)):
            raise _translated(error) from error
        raise
    return UpstreamAnswer(response, first)


def sendable(body: bytes) -> bytes | io.BytesIO | None:
    """A body as aiohttp wants it: in pieces when it is long, so that other requests get a turn meanwhile."""
    return io.BytesIO(body) if len(body) > _SENT_AT_ONCE_BYTES else body or None


def _translated(error: Exception) -> UpstreamError:
    match error:
        case aiohttp.ClientConnectorError():
            return UpstreamError(f"the connection was refused: {error}", cause=REFUSED)
        case aiohttp.ConnectionTimeoutError():
            return UpstreamError("no connection in time", cause=BROKEN)
        case TimeoutError():
            return UpstreamError("nothing came within the idle timeout", cause=LATE)
        case _:
            return UpstreamError(f"the connection broke: {error!r}", cause=BROKEN)


def _named_by_connection(headers: Headers) -> set[bytes]:
    """Headers that a Connection header names belong to that connection only (RFC 9110, 7.6.1)."""
    values = [value for name, value in headers if name == b"connection"]
    return {token.strip().lower() for value in values for token in value.split(b",")} - {b"close", b""}
