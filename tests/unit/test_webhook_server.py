"""The webhook's server, over real TLS on loopback: always an answer in time, always "allowed"."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client import CollectorRegistry

from kvpool_operator.webhook.certificates import Data, bundle, renew, service_names, serving_of
from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.metrics import WebhookMetrics
from kvpool_operator.webhook.review import FindPool
from kvpool_operator.webhook.server import PATH, WebhookServer
from kvpool_operator.webhook.verdicts import VerdictCache
from kvpool_operator.webhook.views import NamespaceFacts, PoolView
from tests.unit.test_webhook_review import request_body
from tests.unit.webhook_pods import POOL, engine_pod

NAMES = service_names("kvpool-operator", "kvpool-system")
START_SECONDS = 40.0


def certificates(names: tuple[str, ...] = NAMES) -> Data:
    """Fresh ones."""
    data = renew({}, datetime.now(UTC), names)
    assert data is not None
    return data


class Running:
    """A server in a thread of its own, as the operator runs it."""

    def __init__(self, find_pool: FindPool = lambda _namespace, _name: POOL, *, deadline_seconds: float = 30.0) -> None:
        self.registry = CollectorRegistry()
        self.data = certificates()
        self.server = WebhookServer(
            find_pool=find_pool,
            find_namespace=NamespaceFacts,
            verdicts=VerdictCache(lambda _pod: ""),
            host="127.0.0.1",
            port=0,
            metrics=WebhookMetrics(self.registry),
            deadline_seconds=deadline_seconds,
        )
        self.server.use_certificate(serving_of(self.data))
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), name="webhook")

    def __enter__(self) -> Running:
        self.thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self.server.is_serving:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(self, *_error: object) -> None:
        self.server.stop()
        self.thread.join(START_SECONDS)
        assert not self.thread.is_alive()

    def connect(self, trusted: bytes) -> ssl.SSLSocket:
        """A connection as the API server makes it: verified by the bundle, for the Service's name."""
        context = ssl.create_default_context(cadata=trusted.decode())
        raw = socket.create_connection(("127.0.0.1", self.server.port), timeout=40.0)
        try:
            return context.wrap_socket(raw, server_hostname=NAMES[0])
        except BaseException:
            raw.close()
            raise

    def request(self, method: str, path: str, body: bytes = b"", trusted: bytes = b"") -> tuple[int, bytes]:
        """Status and body of one request."""
        client = http.client.HTTPConnection(NAMES[0])
        client.sock = self.connect(trusted or bundle(self.data))
        with closing(client):
            client.request(method, path, body)
            response = client.getresponse()
            return response.status, response.read()

    def reviewed(self, body: bytes) -> Manifest:
        """The response to a review."""
        status, answer = self.request("POST", PATH, body)
        assert status == 200
        response: Manifest = json.loads(answer)["response"]
        return response


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server that serves."""
    with Running() as each:
        yield each


def test_a_pod_is_reviewed_over_tls(running: Running) -> None:
    response = running.reviewed(request_body(engine_pod()))
    assert response["allowed"] is True
    assert response["patchType"] == "JSONPatch"
    assert running.registry.get_sample_value("kvpool_webhook_reviews_total", {"outcome": "injected", "reason": ""}) == 1
    expires = running.registry.get_sample_value("kvpool_webhook_certificate_expiry_timestamp_seconds")
    assert expires == pytest.approx(time.time() + timedelta(days=90).total_seconds(), abs=60)


def test_garbage_is_allowed(running: Running) -> None:
    for body in (b"", b"{", b"\xff" * 1000, b"[" * 100_000, b"x" * (9 << 20)):
        assert running.reviewed(body)["allowed"] is True


def test_health_is_told_without_a_review(running: Running) -> None:
    assert running.request("GET", "/healthz") == (200, b"ok")
    assert running.request("GET", PATH)[0] == 405


def test_a_renewed_certificate_is_served_without_a_restart(running: Running) -> None:
    former, fresh = running.data, certificates()
    standing = running.connect(bundle(former))
    with closing(standing):
        running.server.use_certificate(serving_of(fresh))
        with pytest.raises(ssl.SSLCertVerificationError):
            running.connect(bundle(former))
        running.data = fresh
        assert running.request("GET", "/healthz")[0] == 200
        standing.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert standing.recv(64).startswith(b"HTTP/1.1 200")


def test_old_protocols_are_refused(running: Running) -> None:
    context = ssl.create_default_context(cadata=bundle(running.data).decode())
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=40.0) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"200" not in raw.recv(64)


def failures(running: Running, reason: str) -> float | None:
    """How often a review failed for this reason."""
    labels = {"outcome": "failed", "reason": reason}
    return running.registry.get_sample_value("kvpool_webhook_reviews_total", labels)


def test_an_internal_error_is_allowed_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(namespace: str, name: str) -> PoolView | None:
        raise KeyError("a bug")

    with Running(fail) as running:
        response = running.reviewed(request_body(engine_pod()))
        assert response["allowed"] is True
        assert response["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
        assert "internal error" in response["warnings"][0]
        assert "a bug" in caplog.text
        assert failures(running, "KeyError") == 1


def test_a_review_that_hangs_is_allowed_before_the_api_servers_patience_ends() -> None:
    release = threading.Event()

    def hang(namespace: str, name: str) -> PoolView | None:
        release.wait(30.0)
        return None

    with Running(hang, deadline_seconds=0.2) as running:
        started = time.monotonic()
        response = running.reviewed(request_body(engine_pod()))
        release.set()
        assert time.monotonic() - started < 20.0
        assert response["allowed"] is True
        assert failures(running, "DeadlineExceeded") == 1
