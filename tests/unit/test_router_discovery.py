"""Endpoints that come and go while the router runs, as the operator's pod watch will make them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvpool_router.config import parse_config
from kvpool_router.discovery import EndpointSpec
from kvpool_router.request_body import parse_body
from kvpool_router.router import Router
from tests.unit.router_stubs import StubEngine, until


class Changing:
    """A source whose sets the test puts in."""

    def __init__(self) -> None:
        self.sets: asyncio.Queue[Sequence[EndpointSpec]] = asyncio.Queue()
        self.failures = 0

    async def watch(self) -> AsyncIterator[Sequence[EndpointSpec]]:
        """Yield what was put in; fail where nothing but an empty name was."""
        while True:
            specs = await self.sets.get()
            if any(not spec.address for spec in specs):
                self.failures += 1
                raise RuntimeError("a bug in the source")
            yield specs


def _spec(engine: StubEngine) -> EndpointSpec:
    return EndpointSpec(engine.address, f"http://{engine.address}", "")


async def _routed(router: Router) -> str | None:
    plan = await router.picker.plan(
        parse_body(b'{"prompt": [1, 2]}', tenant="", trust_client_salt=False), authorization=None
    )
    route = router.picker.choose(plan, now=0.0)
    return route.target.name if route else None


@asynccontextmanager
async def _running(folder: Path, first: Sequence[EndpointSpec]) -> AsyncIterator[tuple[Router, Changing]]:
    source = Changing()
    source.sets.put_nowait(first)
    config = parse_config(f"admin: {{token_file: {folder}/t}}\nendpoints: []\n")
    router = Router(config, source, registry=CollectorRegistry())
    await router.start()
    try:
        yield router, source
    finally:
        await router.stop()


@asynccontextmanager
async def _engines(count: int) -> AsyncIterator[list[StubEngine]]:
    engines = [StubEngine() for _ in range(count)]
    for engine in engines:
        await engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


def _ready(router: Router) -> list[str]:
    return [endpoint.address for endpoint in router.table.all() if endpoint.up]


def test_endpoints_come_and_go(tmp_path: Path) -> None:
    async def run() -> None:
        async with _engines(2) as (first, second), _running(tmp_path, [_spec(first)]) as (router, source):
            assert await _routed(router) == first.address
            source.sets.put_nowait([_spec(second)])
            await until(lambda: _ready(router) == [second.address])
            assert await _routed(router) == second.address
            router.refresh_gauges()
            gone = {"endpoint": first.address}
            assert router.metrics.registry.get_sample_value("kvpool_router_endpoint_up", gone) is None
            source.sets.put_nowait([])
            await until(lambda: not router.table.all())
            assert await _routed(router) is None

    asyncio.run(run())


def test_bug_in_a_task_does_not_end_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with _engines(1) as (engine,), _running(tmp_path, []) as (router, source):
            source.sets.put_nowait([EndpointSpec("", "", "")])
            source.sets.put_nowait([_spec(engine)])
            await until(lambda: _ready(router) == [engine.address])
            assert source.failures == 1

    asyncio.run(run())
