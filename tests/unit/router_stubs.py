"""Stub engines and stub agents for the router's tests, and the router between them, all over loopback.

Engines and agents are network boundaries that cannot run in the unit suite: the stubs speak the real HTTP and the real
frames. The router is the real one, served by uvicorn in the same event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from kvpool_core.block_hash import block_hashes, short_hash
from kvpool_core.wire import (
    EngineInfo,
    EventsAlive,
    EventsBegin,
    EventsDelta,
    EventsPart,
    EventsReady,
    GroupLayout,
    Message,
    TierBlocks,
    encode,
)
from kvpool_router.admin import build_admin
from kvpool_router.config import RouterConfig, parse_config
from kvpool_router.discovery import ConfiguredMembers
from kvpool_router.proxy import build_app
from kvpool_router.route_header import parse_route
from kvpool_router.router import Router

BLOCK_SIZE = 16
SEED = "vllm-none-hash"
DOMAIN = bytes(range(16))
TOKEN = "agent-token"
ADMIN_TOKEN = "admin-token"
MODEL = "model"
FULL = GroupLayout(0, 4096, BLOCK_SIZE, 0)
WINDOW = GroupLayout(1, 4096, BLOCK_SIZE, 4)
DEADLINE_SECONDS = 10.0


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; AssertionError when it does not come true."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 (conditions are states of the code under test)
            await asyncio.sleep(0.002)


def tokens_of(text: str) -> list[int]:
    """The stub engines' tokenizer: one token for each character."""
    return [ord(character) for character in text]


def hashes_of(text: str, *, salt: str | None = None, lora: tuple[str, str] | None = None) -> list[int]:
    """Short hashes of the full blocks of a prompt."""
    hashes = block_hashes(tokens_of(text), block_size=BLOCK_SIZE, seed=SEED, cache_salt=salt, lora=lora)
    return [short_hash(block) for block in hashes]


def prompt(name: str, blocks: int) -> str:
    """A prompt of so many full blocks and a bit, unlike any of another name."""
    return (f"{name}-" * (blocks * BLOCK_SIZE))[: blocks * BLOCK_SIZE + 3]


@dataclass
class Received:
    """One request that an engine got. `cancelled` is set when its client broke the connection."""

    path: str
    headers: dict[str, str]
    raw: bytes
    client: object
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> dict[str, Any]:
        """The body as JSON."""
        content: dict[str, Any] = json.loads(self.raw)
        return content


class StubEngine:
    """An engine's HTTP side. `gate` open: answers begin at once; `pieces_gate` open: further pieces follow at once."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.pieces_gate = asyncio.Event()
        self.pieces_gate.set()
        self.tokenize_gate = asyncio.Event()
        self.tokenize_gate.set()
        self.tokenize_requests: list[dict[str, Any]] = []
        self.health_gate = asyncio.Event()
        self.health_gate.set()
        self.healthy = True
        self.api_key = ""
        self.break_before_first_byte = False
        self.break_after_first_piece = False
        self.models: list[dict[str, Any]] = [{"id": MODEL, "object": "model", "root": "/models/m", "parent": None}]
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; on the port of before when it was started before."""
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/{tail:.*}", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and drop all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        await self.health_gate.wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.Response(status=401)
        return web.json_response({"object": "list", "data": self.models})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.tokenize_requests.append(body)
        await self.tokenize_gate.wait()
        text = body["prompt"] if "prompt" in body else _render(body["messages"])
        return web.json_response({"count": len(text), "max_model_len": 8192, "tokens": tokens_of(text)})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        received = Received(request.path, dict(request.headers), await request.read(), request.transport)
        self.received.append(received)
        try:
            return await self._answer(request, received)
        except asyncio.CancelledError:
            received.cancelled.set()
            raise

    async def _answer(self, request: web.Request, received: Received) -> web.StreamResponse:
        await self.gate.wait()
        if self.break_before_first_byte:
            _break(request)
        if not received.body.get("stream"):
            return web.json_response({"engine": self.port}, headers={"x-engine": str(self.port), "keep-alive": "9"})
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", "x-engine": str(self.port)})
        await answer.prepare(request)
        for number in range(3):
            await answer.write(f"data: {number}\n\n".encode())
            if self.break_after_first_piece:
                _break(request)
            await self.pieces_gate.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer


def _break(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError


def _render(messages: Sequence[dict[str, Any]]) -> str:
    return "".join(f"<{message['role']}>{message['content']}" for message in messages)


class StubAgent:
    """An agent's event stream: a snapshot of `engines` and `blocks`, then what is published."""

    def __init__(self) -> None:
        self.boot_id = b"boot-1"
        self.seq = 0
        self.engines: list[EngineInfo] = []
        self.blocks: list[TierBlocks] = []
        self.subscriptions = 0
        self.refuse = False
        self.hold_snapshot: asyncio.Event | None = None
        self._queues: list[asyncio.Queue[bytes | None]] = []
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen; on the port of before when it was started before."""
        app = web.Application()
        app.router.add_get("/v1/events", self._events)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and end all streams."""
        self.end_streams()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def end_streams(self) -> None:
        """End the streams, as an agent that drops a slow subscriber does."""
        for queue in self._queues:
            queue.put_nowait(None)

    def send(self, frame: bytes) -> None:
        """Send bytes on every stream."""
        for queue in self._queues:
            queue.put_nowait(frame)

    def publish(
        self,
        *,
        engines: Iterable[EngineInfo] = (),
        stored: Iterable[TierBlocks] = (),
        removed: Iterable[TierBlocks] = (),
        cleared: Iterable[TierBlocks] = (),
    ) -> None:
        """A delta with the next sequence number."""
        self.seq += 1
        delta = EventsDelta(0, self.boot_id, self.seq, list(engines), list(stored), list(removed), list(cleared))
        self.send(encode(delta))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.refuse or request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        self.subscriptions += 1
        answer = web.StreamResponse()
        await answer.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues.append(queue)
        try:
            await answer.write(encode(EventsBegin(0, self.boot_id, self.seq)))
            await answer.write(encode(EventsPart(0, list(self.engines), list(self.blocks))))
            if self.hold_snapshot is not None:
                await self.hold_snapshot.wait()
            await answer.write(encode(EventsReady(0)))
            while (frame := await queue.get()) is not None:
                await answer.write(frame)
        finally:
            self._queues.remove(queue)
        return answer


def alive(agent: StubAgent) -> Message:
    """A sign of life with the right numbers."""
    return EventsAlive(0, agent.boot_id, agent.seq)


def engine_info(
    engine: StubEngine, name: str, *, dp_rank: int = 0, domain: bytes = DOMAIN, connected: bool = True
) -> EngineInfo:
    """The engine as its agent reports it."""
    return EngineInfo(
        engine_id=name,
        endpoint=engine.address,
        dp_rank=dp_rank,
        served_names=[MODEL],
        block_size=BLOCK_SIZE,
        hash_seed=SEED,
        domain=domain,
        groups=[FULL, WINDOW],
        connected=connected,
    )


def gpu(name: str, hashes: Iterable[int]) -> TierBlocks:
    """Blocks on an engine's GPU."""
    return TierBlocks("gpu", name, b"", 0, list(hashes))


def tier(name: str, hashes: Iterable[int], *, domain: bytes = DOMAIN, group: int = 0) -> TierBlocks:
    """Blocks in `ram` or `valkey`."""
    return TierBlocks(name, "", domain, group, list(hashes))


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def route(self) -> dict[str, str]:
        """The route header's pairs."""
        return parse_route(self.headers["x-kvpool-route"])


@dataclass
class Fleet:
    """Everything of one test."""

    engines: list[StubEngine]
    agents: list[StubAgent]
    router: Router
    client: aiohttp.ClientSession
    url: str
    admin_url: str

    async def ask(self, path: str = "/v1/completions", *, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        """POST to the proxy and read the whole answer."""
        body.setdefault("model", MODEL)
        async with self.client.post(f"{self.url}{path}", json=body, headers=headers) as response:
            lowered = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, lowered, await response.read())

    async def admin(self, method: str, path: str, *, token: str = ADMIN_TOKEN, **body: Any) -> Answer:
        """Ask the admin API."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.client.request(method, f"{self.admin_url}{path}", headers=headers, json=body or None) as reply:
            return Answer(reply.status, dict(reply.headers), await reply.read())

    async def in_step(self) -> None:
        """Wait until every agent's stream is in step and every engine up."""
        await until(lambda: all(state.lost_at is None for state in self.router.fleet.agent_states().values()))
        await until(lambda: all(endpoint.up for endpoint in self.router.table.all()))

    def index_of(self, address: str) -> int:
        """Which engine an address is."""
        return [engine.address for engine in self.engines].index(address)

    def chosen(self, answer: Answer) -> int:
        """Which engine answered."""
        return self.index_of(answer.route["endpoint"])

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, 0 when it was never touched."""
        return self.router.metrics.registry.get_sample_value(name, labels) or 0.0


FAST: dict[str, dict[str, float]] = {
    "timeouts": {"probe_interval_seconds": 0.05, "probe_seconds": 1.0, "models_interval_seconds": 0.2},
    "index": {"stale_seconds": 0.3, "backoff_min_seconds": 0.01, "backoff_max_seconds": 0.05, "silence_seconds": 5.0},
    "tokenization": {"base_seconds": 2.0},
}


@asynccontextmanager
async def running_fleet(
    folder: Path, *, engines: int = 2, report: bool = True, settings: dict[str, Any] | None = None
) -> AsyncIterator[Fleet]:
    """Engine i beside agent i, and the router before them. `report`: agents report their engines from the start."""
    async with AsyncExitStack() as stack:
        stub_engines = [StubEngine() for _ in range(engines)]
        agents = [StubAgent() for _ in range(engines)]
        stubs: list[StubEngine | StubAgent] = [*stub_engines, *agents]
        for stub in stubs:
            await stub.start()
            stack.push_async_callback(stub.stop)
        for number, (engine, agent) in enumerate(zip(stub_engines, agents, strict=True)):
            agent.engines = [engine_info(engine, f"engine-{number}")] if report else []
        router = Router(*_settings(folder, stub_engines, agents, settings or {}), registry=CollectorRegistry())
        await router.start()
        stack.push_async_callback(router.stop)
        url = await stack.enter_async_context(_served(build_app(router.proxy_parts())))
        admin_url = await stack.enter_async_context(_served(build_admin(router)))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        fleet = Fleet(stub_engines, agents, router, client, url, admin_url)
        await fleet.in_step()
        yield fleet


def _settings(
    folder: Path, engines: list[StubEngine], agents: list[StubAgent], changed: dict[str, Any]
) -> tuple[RouterConfig, ConfiguredMembers]:
    (folder / "agent-token").write_text(TOKEN)
    (folder / "admin-token").write_text(ADMIN_TOKEN)
    document: dict[str, Any] = {
        "admin": {"token_file": str(folder / "admin-token")},
        "endpoints": [{"url": f"http://{engine.address}", "agent": f"node-{i}"} for i, engine in enumerate(engines)],
        "agents": [
            {"name": f"node-{i}", "url": f"http://127.0.0.1:{agent.port}", "token_file": str(folder / "agent-token")}
            for i, agent in enumerate(agents)
        ],
    }
    for section, values in {**FAST, **changed}.items():
        document[section] = {**FAST.get(section, {}), **values} if isinstance(values, dict) else values
    config = parse_config(json.dumps(document))
    return config, ConfiguredMembers(config)


@asynccontextmanager
async def _served(app: ASGIApp) -> AsyncIterator[str]:
    """The application over uvicorn, without its main loop and shutdown (whose ticks of 0.1 s would only make tests slow)."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        await until(lambda: not server.server_state.connections)
        for listener in server.servers:
            listener.close()
            await listener.wait_closed()
