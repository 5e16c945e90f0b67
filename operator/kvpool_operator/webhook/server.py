"""Serves the pod webhook over TLS.

Invariant: a request that reaches it is answered, within `DEADLINE_SECONDS`, with "allowed": whatever fails is logged,
counted and costs the pod its cache, never its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import REGISTRY

from kvpool_operator.webhook.certificates import Serving
from kvpool_operator.webhook.metrics import WebhookMetrics
from kvpool_operator.webhook.review import FindNamespace, FindPool, PodReviewer, Review, allow, request_uid
from kvpool_operator.webhook.serving_context import build_context, load
from kvpool_operator.webhook.verdicts import VerdictCache

logger = logging.getLogger(__name__)

PATH: Final = "/mutate-pods"
DEADLINE_SECONDS: Final = 3.0
"""Below the `timeoutSeconds` (5) of the webhook configuration, with room for the network."""
MOST_BYTES: Final = 8 << 20
"""The API server sends no object above 3 MiB (1.5 MiB of etcd, twice for old and new)."""
THREADS: Final = 8
"""Reviews at the same time; each takes about a millisecond, only a dry run waits."""

ReviewBody = Callable[[bytes], Review]


def build_app(review: ReviewBody, metrics: WebhookMetrics, *, deadline_seconds: float) -> FastAPI:
    """The application around a review."""
    app = FastAPI(title="kvpool webhook", docs_url=None, redoc_url=None, openapi_url=None)
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="webhook")

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response("ok")

    @app.post(PATH)
    async def mutate_pods(request: Request) -> Response:
        started = time.monotonic()
        body = await _read(request)
        try:
            loop = asyncio.get_running_loop()
            answer = await asyncio.wait_for(loop.run_in_executor(threads, review, body), deadline_seconds)
        except TimeoutError:
            answer = _failed(body, "DeadlineExceeded", f"no decision within {deadline_seconds:g} s")
        except Exception as error:
            logger.exception("a review failed")
            answer = _failed(body, type(error).__name__, "internal error, see the operator's log")
        metrics.reviews.labels(answer.outcome, answer.reason).inc()
        metrics.seconds.observe(time.monotonic() - started)
        logger.info("review pod=%s outcome=%s reason=%s", answer.pod, answer.outcome, answer.reason)
        return Response(answer.body, media_type="application/json")

    return app


async def _read(request: Request) -> bytes:
    """The body; of one that is too large its beginning, which is then no review."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            break
    return bytes(body)


def _failed(body: bytes, reason: str, text: str) -> Review:
    return allow(request_uid(body), "failed", reason=reason, warning=f"the pod is not given the cache: {text}")


class WebhookServer:
    """The server; its certificate may be exchanged from any thread, before and while it serves."""

    def __init__(
        self,
        *,
        find_pool: FindPool,
        find_namespace: FindNamespace,
        verdicts: VerdictCache,
        port: int,
        host: str = "",
        metrics: WebhookMetrics | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        """host: "" listens on every address. A port of 0 is any free one."""
        reviewer = PodReviewer(find_pool=find_pool, find_namespace=find_namespace, verdicts=verdicts)
        self._metrics = metrics or WebhookMetrics(REGISTRY)
        self._context = build_context()
        config = uvicorn.Config(
            build_app(reviewer.review, self._metrics, deadline_seconds=deadline_seconds),
            host=host,
            port=port,
            ssl_context_factory=lambda _config, _default: self._context,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(DEADLINE_SECONDS) + 1,
        )
        self._server = _Server(config)

    def use_certificate(self, serving: Serving) -> None:
        """Serve this certificate from the next handshake on."""
        load(self._context, serving)
        self._metrics.certificate_expires.set(serving.expires.timestamp())

    @property
    def is_serving(self) -> bool:
        """Whether it listens."""
        return self._server.started and not self._server.should_exit

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    async def serve(self) -> None:
        """Serve until `stop`."""
        await self._server.serve()

    def stop(self) -> None:
        """End after the requests in flight; may be called from any thread."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Leaves signals to the operator's process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield
