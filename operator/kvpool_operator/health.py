"""/healthz, /readyz and /metrics of the operator.

Invariant: /healthz fails only when a restart would help; a replica that does not lead is healthy and ready.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Check = Callable[[], str]
"""What is wrong, "" = nothing."""


class HealthServer(ThreadingHTTPServer):
    """Every address, IPv4 and IPv6."""

    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, port: int, *, healthy: Check, ready: Check, registry: CollectorRegistry) -> None:
        """A port of 0 is any free one."""
        self.answers: dict[str, Callable[[], tuple[int, bytes, str]]] = {
            "/healthz": lambda: _verdict(healthy()),
            "/readyz": lambda: _verdict(ready()),
            "/metrics": lambda: (200, generate_latest(registry), CONTENT_TYPE_LATEST),
        }
        host = "::" if self.address_family == socket.AF_INET6 else "0.0.0.0"
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """IPv4 too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _verdict(problem: str) -> tuple[int, bytes, str]:
    return 503 if problem else 200, f"{problem or 'ok'}\n".encode(), "text/plain; charset=utf-8"


class _Handler(BaseHTTPRequestHandler):
    server: HealthServer
    timeout = 10
    """Seconds of silence after which a client is left."""

    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path.partition("?")[0])
        code, body, kind = answer() if answer else (404, b"not found\n", "text/plain; charset=utf-8")
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the library's name)
        """Probes are not worth a line."""
