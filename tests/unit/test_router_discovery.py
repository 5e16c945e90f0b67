"""Endpoints that come and go while the router runs, as the operator's pod watch will make them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from kvpool_router.config import parse_config
from kvpool_router.discovery import AgentAddress, EndpointSpec, Members
from kvpool_router.metrics import RouterMetrics
from kvpool_router.request_body import parse_body
from kvpool_router.router import Router
from tests.unit.router_stubs import TOKEN, StubAgent, StubEngine, until


class Changing:
    """A source whose sets the test puts in."""

    def __init__(self) -> None:
        self.sets: asyncio.Queue[Members] = asyncio.Queue()
        self.failures = 0

    def put(self, endpoints: Sequence[EndpointSpec], agents: Sequence[AgentAddress] = ()) -> None:
        """The fleet is this from now on."""
        self.sets.put_nowait(Members(tuple(endpoints), tuple(agents)))

    async def watch(self, metrics: RouterMetrics) -> AsyncIterator[Members]:  # noqa: ARG002
        """Yield what was put in; fail where nothing but an empty name was."""
        while True:
            members = await self.sets.get()
            if any(not spec.address for spec in members.endpoints):
                self.failures += 1
                raise RuntimeError("a bug in the source")
            yield members


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
    source.put(first)
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


@asynccontextmanager
async def _agents(count: int) -> AsyncIterator[list[StubAgent]]:
    agents = [StubAgent() for _ in range(count)]
    for agent in agents:
        await agent.start()
    try:
        yield agents
    finally:
        for agent in agents:
            await agent.stop()


def _ready(router: Router) -> list[str]:
    return [endpoint.address for endpoint in router.table.all() if endpoint.up]


def test_endpoints_come_and_go(tmp_path: Path) -> None:
    async def run() -> None:
        async with _engines(2) as (first, second), _running(tmp_path, [_spec(first)]) as (router, source):
            assert await _routed(router) == first.address
            source.put([_spec(second)])
            await until(lambda: _ready(router) == [second.address])
            assert await _routed(router) == second.address
            router.refresh_gauges()
            gone = {"endpoint": first.address}
            assert router.metrics.registry.get_sample_value("kvpool_router_endpoint_up", gone) is None
            source.put([])
            await until(lambda: not router.table.all())
            assert await _routed(router) is None

    asyncio.run(run())


def test_nothing_is_kept_of_an_endpoint_that_went_with_a_request_in_flight(tmp_path: Path) -> None:
    async def run() -> None:
        async with _engines(1) as (engine,), _running(tmp_path, [_spec(engine)]) as (router, source):
            body = parse_body(b'{"prompt": [1, 2]}', tenant="", trust_client_salt=False)
            route = router.picker.choose(await router.picker.plan(body, authorization=None), now=0.0)
            assert route is not None
            charge = router.book.start(
                route.target.name, left_tokens=2, cold=True, streaming=True, now=0.0, prefill_seconds=None
            )
            source.put([])
            await until(lambda: not router.table.all())
            router.picker.assume_held(replace(route, chain=[1]), now=0.0)
            router.health.mark_down(route.target.endpoint, "refused")
            await router.health.probe(route.target.endpoint)
            router.book.end(charge)
            router.refresh_gauges()
            assert (router.book.targets(), len(router.speculative)) == ([], 0)
            assert engine.address not in generate_latest(router.metrics.registry).decode()

    asyncio.run(run())


def test_agents_come_move_and_go(tmp_path: Path) -> None:
    async def run() -> None:
        (tmp_path / "t").write_text(TOKEN)
        async with _agents(2) as (first, second), _running(tmp_path, []) as (router, source):
            second.boot_id = b"boot-2"
            address = {agent: f"http://127.0.0.1:{agent.port}" for agent in (first, second)}
            source.put([], [AgentAddress("node-a", address[first], str(tmp_path / "t"))])
            await until(router.fleet.in_step)
            boot_id = router.fleet.agent_states()["node-a"].boot_id
            source.put([], [AgentAddress("node-a", address[second], str(tmp_path / "t"))])
            await until(lambda: router.fleet.agent_states()["node-a"].boot_id != boot_id)
            assert router.fleet.in_step()
            source.put([])
            await until(lambda: not router.fleet.agent_states())
            in_step = {"agent": "node-a"}
            assert router.metrics.registry.get_sample_value("kvpool_router_agent_in_step", in_step) is None

    asyncio.run(run())


def test_bug_in_a_task_does_not_end_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with _engines(1) as (engine,), _running(tmp_path, []) as (router, source):
            source.put([EndpointSpec("", "", "")])
            source.put([_spec(engine)])
            await until(lambda: _ready(router) == [engine.address])
            assert source.failures == 1

    asyncio.run(run())
