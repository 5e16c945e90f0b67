"""Small blocking HTTP for tests and demo: JSON in, JSON out, Server-Sent Events with their times."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """Status, headers with lower-case names, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Streamed:
    """A streamed reply. first_event_seconds: from sending to the first event with a choice; total likewise to the end."""

    status: int
    headers: dict[str, str]
    events: list[Any] = field(default_factory=list)
    first_event_seconds: float = 0.0
    total_seconds: float = 0.0


def request(
    method: str,
    url: str,
    body: object = None,
    *,
    headers: Mapping[str, str] | None = None,
    seconds: float = TIMEOUT_SECONDS,
) -> Reply:
    """One request on a connection of its own."""
    with _exchange(method, url, body, headers or {}, seconds) as response:
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def is_ok(url: str) -> bool:
    """Whether GET answers 200 at once."""
    try:
        return request("GET", url, seconds=2.0).status == 200
    except OSError:
        return False


def stream(
    url: str, body: object, *, headers: Mapping[str, str] | None = None, seconds: float = TIMEOUT_SECONDS
) -> Streamed:
    """POST and read Server-Sent Events until they end."""
    started = time.perf_counter()
    seen: list[Any] = []
    first = 0.0
    with _exchange("POST", url, body, headers or {}, seconds) as response:
        for event in _events(response):
            if not first and event.get("choices"):
                first = time.perf_counter() - started
            seen.append(event)
        reply_headers = {k.lower(): v for k, v in response.getheaders()}
        return Streamed(response.status, reply_headers, seen, first, time.perf_counter() - started)


def events(url: str, body: object, *, seconds: float = TIMEOUT_SECONDS) -> Generator[Any, None, None]:
    """POST and yield Server-Sent Events as they come; closed, it leaves."""
    with _exchange("POST", url, body, {}, seconds) as response:
        yield from _events(response)


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


@contextmanager
def _exchange(
    method: str, url: str, body: object, headers: Mapping[str, str], seconds: float
) -> Iterator[http.client.HTTPResponse]:
    """Its answer; the connection is closed however it ends."""
    parts = urlsplit(url)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    payload = None if body is None else json.dumps(body).encode()
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=seconds)) as connection:
        connection.request(method, path or "/", payload, {"content-type": "application/json", **headers})
        with connection.getresponse() as response:
            yield response
