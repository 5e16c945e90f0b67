"""Asking agents, and answering the kubelet."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvpool_operator import agent_stats
from kvpool_operator.fence import OpenFence
from kvpool_operator.health import HealthServer
from kvpool_operator.metrics import OperatorMetrics
from kvpool_operator.observed import AgentStats, Pod
from tests.unit.dripping import dripping

STATS = {
    "ready": False,
    "waiting_for": "ArenaPending: engine e",
    "draining": False,
    "arena": {"state": "pending", "reason": "ArenaPending", "waiting_for": "ArenaPending: engine e"},
    "valkey": {"state": "unauthenticated", "detail": "refused"},
}


@contextmanager
def agent(answer: bytes, status: int = 200) -> Iterator[tuple[int, list[str]]]:
    """An agent's admin API; what it is asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path} {self.headers['authorization']}")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET  # noqa: N815 (the library's names)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def test_agent_says_what_it_waits_for_and_how_valkey_is() -> None:
    with agent(json.dumps(STATS).encode()) as (port, asked):
        stats = agent_stats.ask("127.0.0.1", "secret", port=port)

    assert asked == ["GET /v1/stats Bearer secret"]
    assert (stats.arena_reason, stats.valkey_state, stats.is_ready, stats.error) == (
        "ArenaPending",
        "unauthenticated",
        False,
        "",
    )


def test_agent_that_cannot_be_asked_is_an_answer_too() -> None:
    with agent(b"no", 401) as (port, _):
        refused = agent_stats.ask("127.0.0.1", "wrong", port=port)
    with agent(b"[1]") as (port, _):
        nonsense = agent_stats.ask("127.0.0.1", "t", port=port)
    gone = agent_stats.ask("127.0.0.1", "t", port=port)

    assert "401" in refused.error
    assert nonsense.error
    assert gone.error


def test_only_running_pods_are_asked() -> None:
    pods = [
        Pod(namespace="n", name="a", uid="a", ip="127.0.0.1", phase="Running"),
        Pod(namespace="n", name="b", uid="b", phase="Running"),
        Pod(namespace="n", name="c", uid="c", ip="127.0.0.1", phase="Running", is_terminating=True),
    ]
    with agent(json.dumps(STATS).encode()) as (port, _):
        stats = agent_stats.ask_all(pods, "t", port=port)

    assert set(stats) == {"a"}


@pytest.mark.parametrize(
    "answer",
    [
        {"arena": ["x"], "ready": True},
        {"valkey": "x", "arena": 1, "ready": True},
        {"arena": {"reason": {"a": 1}, "waiting_for": ["x"]}, "waiting_for": 7, "ready": True},
    ],
)
def test_parts_of_the_wrong_type_count_as_absent(answer: dict[str, Any]) -> None:
    with agent(json.dumps(answer).encode()) as (port, _):
        stats = agent_stats.ask_all(
            [Pod(namespace="n", name="a", uid="a", ip="127.0.0.1", phase="Running")], "t", port=port
        )

    assert stats == {"a": AgentStats(is_ready=True)}


@pytest.mark.parametrize("answer", [b"[" * 100_000, b'{"ready": ' + b"9" * 5000 + b"}", b"\xff"])
def test_hostile_json_is_an_answer_too(answer: bytes) -> None:
    with agent(answer) as (port, _):
        assert agent_stats.ask("127.0.0.1", "t", port=port).error


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"])
def test_agent_that_drips_is_left_at_the_deadline(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_stats, "ASK_TIMEOUT_SECONDS", 0.3)
    with dripping(start) as port:
        began = time.monotonic()
        stats = agent_stats.ask("127.0.0.1", "t", port=port)

    assert stats.error
    assert time.monotonic() - began < 2.0


def test_agent_that_sends_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_stats, "ANSWER_MAX_BYTES", 1000)
    with agent(b" " * 2000 + b"{}") as (port, _):
        assert "too long" in agent_stats.ask("127.0.0.1", "t", port=port).error


def test_agent_is_asked_to_drain() -> None:
    with agent(b'{"drained": true}') as (port, asked):
        assert agent_stats.drain("127.0.0.1", "t", 5, fence=OpenFence(), port=port)

    assert asked == ["POST /v1/drain?timeout_seconds=5 Bearer t"]


def test_health_readiness_and_metrics_are_served() -> None:
    registry = CollectorRegistry()
    OperatorMetrics(registry).leading.set(1)
    problems = {"ready": "the webhook does not serve yet"}
    server = HealthServer(0, healthy=lambda: "", ready=lambda: problems["ready"], registry=registry)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()

    def get(path: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=5)
        connection.request("GET", path)
        response = connection.getresponse()
        answer = response.status, response.read().decode()
        connection.close()
        return answer

    try:
        assert get("/healthz") == (200, "ok\n")
        assert get("/readyz") == (503, "the webhook does not serve yet\n")
        problems["ready"] = ""
        assert get("/readyz?verbose") == (200, "ok\n")
        assert "kvpool_operator_leading 1.0" in get("/metrics")[1]
        assert get("/other")[0] == 404
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
