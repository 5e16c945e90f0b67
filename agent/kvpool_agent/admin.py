"""The admin API: health and metrics for everybody, the rest for holders of the token.

Invariant: no route below /v1 answers without the bearer token; none runs code or shows content of blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvpool_agent.agent import Agent
from kvpool_agent.arena_status import ArenaStatus
from kvpool_agent.config import Config
from kvpool_agent.events import Subscriber
from kvpool_agent.metrics import AgentMetrics

ALIVE_SECONDS = 2.0
"""A silent event stream says that it is alive this often."""
DRAIN_TIMEOUT_MAX_SECONDS = 3600.0
STREAM_TYPE = "application/x-kvpool-events"

log = logging.getLogger("kvpool.agent.admin")


class AdminState:
    """What the API shows: `agent` is None until the arena is there, `arena` says what is waited for."""

    def __init__(self, config: Config, metrics: AgentMetrics, *, boot_id: bytes) -> None:
        self.config = config
        self.registry = metrics.registry
        self.boot_id = boot_id
        self.arena = ArenaStatus(metrics, config.ram.capacity_bytes)
        self.agent: Agent | None = None
        self.stopping = False

    def open(self, agent: Agent) -> None:
        """The arena is there."""
        self.arena.serve()
        self.agent = agent

    def stats(self) -> dict[str, object]:
        """What /v1/stats shows, in one shape before and after."""
        problem = not_ready_reason(self)
        stats: dict[str, object] = {
            "ready": not problem,
            "waiting_for": self.arena.waiting_for,
            "boot_id": self.boot_id.hex(),
            "pool": {"namespace": self.config.pool.namespace, "name": self.config.pool.name},
            "node": self.config.node,
            "draining": False,
            "engines": [],
            "valkey": None,
        }
        stats |= self.agent.stats() if self.agent is not None else {}
        arena = stats.get("arena", {})
        assert isinstance(arena, dict)
        return stats | {"arena": self.arena.report() | arena}


class Token:
    """The bearer token of a file, re-read when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._value = b""

    def admits(self, header: str) -> bool:
        """Whether an Authorization header carries it; never while the file is missing or empty."""
        scheme, _, given = header.partition(" ")
        expected = self._read()
        return bool(expected) and scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), expected)

    def _read(self) -> bytes:
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_ino)
            if seen != self._seen:
                self._value = self._path.read_bytes().strip()
                self._seen = seen
        except OSError as error:
            log.warning("cannot read the admin token", extra={"data": {"file": str(self._path), "reason": str(error)}})
            self._value, self._seen = b"", None
        return self._value


def build_app(state: AdminState, token: Token) -> FastAPI:
    """The application."""
    app = FastAPI(title="kvpool agent", docs_url=None, redoc_url=None, openapi_url=None)
    _add_open_routes(app, state)
    protected = APIRouter(prefix="/v1", dependencies=[Depends(_authentication(token))])
    _add_routes(protected, state)
    app.include_router(protected)
    return app


def _authentication(token: Token) -> Callable[[Request], None]:
    def authenticate(request: Request) -> None:
        if not token.admits(request.headers.get("authorization", "")):
            raise HTTPException(401, "a valid bearer token is required", headers={"www-authenticate": "Bearer"})

    return authenticate


def _add_open_routes(app: FastAPI, state: AdminState) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    async def readyz() -> Response:
        problem = not_ready_reason(state)
        return PlainTextResponse(f"{problem or 'ok'}\n", status_code=503 if problem else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(state.registry), media_type=CONTENT_TYPE_LATEST)


def not_ready_reason(state: AdminState) -> str:
    """Why engines should not rely on this agent now; "" when they may."""
    if state.stopping:
        return "stopping"
    if state.agent is None:
        return state.arena.problem
    return "draining" if state.agent.draining else ""


def _add_routes(router: APIRouter, state: AdminState) -> None:
    @router.get("/stats")
    async def stats() -> Response:
        return JSONResponse(state.stats())

    @router.post("/drain")
    async def drain(timeout_seconds: float = 30.0) -> Response:
        agent = state.agent
        if agent is None:
            return JSONResponse({"drained": True})
        drained = await agent.drain(min(max(timeout_seconds, 0.0), DRAIN_TIMEOUT_MAX_SECONDS))
        return JSONResponse({"drained": drained})

    @router.get("/events")
    async def events() -> Response:
        agent = state.agent
        subscriber = agent.subscribe() if agent is not None else None
        if agent is None or subscriber is None:
            reason = "too many subscribers" if agent is not None else "the arena is not there yet"
            return JSONResponse({"error": reason}, status_code=503, headers={"retry-after": "1"})
        return StreamingResponse(_stream(agent, subscriber), media_type=STREAM_TYPE)


async def _stream(agent: Agent, subscriber: Subscriber) -> AsyncIterator[bytes]:
    """Frames until the reader goes or falls too far behind."""
    try:
        while (frame := await subscriber.next(ALIVE_SECONDS)) is not None:
            yield frame or agent.hub.alive()
    finally:
        agent.hub.unsubscribe(subscriber)


class AdminServer(uvicorn.Server):
    """uvicorn on our loop; signals are the agent's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handlers alone."""
        yield

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        return int(self.servers[0].sockets[0].getsockname()[1])


def build_server(app: FastAPI) -> AdminServer:
    """A server that is run with `serve(sockets=[...])`."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    return AdminServer(config)


async def wait_until_started(server: AdminServer, task: asyncio.Task[None]) -> None:
    """Return when it listens; raises what stopped it otherwise."""
    while not server.started:
        if task.done():
            task.result()
            raise OSError("the admin API ended before it listened")
        await asyncio.sleep(0.01)
