"""The clients' way into the cluster, here with a Python of this machine in the pod's place."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.harness.pod_transport import PodTransport


class _Echo(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/stream":
            body = b'data: {"choices": [1]}\n\ndata: {"choices": [2]}\n\ndata: [DONE]\n\n'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("X-Kvpool-Route", "endpoint=a")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def transport() -> Iterator[PodTransport]:
    transport = PodTransport([sys.executable, "-u", "-c"])
    yield transport
    transport.close()


def test_replies_come_back_whole(transport: PodTransport, url: str) -> None:
    reply = transport.request("POST", f"{url}/", {"a": "ü"})
    assert (reply.status, reply.json(), reply.headers["x-kvpool-route"]) == (200, {"a": "ü"}, "endpoint=a")
    streamed = transport.stream(f"{url}/stream", {})
    assert [event["choices"] for event in streamed.events] == [[1], [2]]
    assert 0 < streamed.first_event_seconds <= streamed.total_seconds


def test_errors_are_raised_as_they_were(transport: PodTransport) -> None:
    with pytest.raises(ConnectionRefusedError):
        transport.request("GET", "http://127.0.0.1:1/")


def test_a_session_that_ended_is_a_connection_error(transport: PodTransport) -> None:
    transport.close()
    with pytest.raises(ConnectionError):
        transport.request("GET", "http://127.0.0.1:1/")
