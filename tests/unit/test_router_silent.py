"""Endpoints that take connections and never answer: silent, not down."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvpool_router.discovery import EndpointSpec
from kvpool_router.endpoints import EndpointTable
from tests.unit.router_stubs import Fleet, prompt, running_fleet, until

LONG = prompt("long", 4)
PROBES: dict[str, Any] = {
    "timeouts": {"probe_interval_seconds": 0.02, "probe_seconds": 0.05, "probe_failures": 2, "idle_seconds": 60.0}
}


def silent(fleet: Fleet, number: int) -> bool:
    """Whether the router takes an endpoint for silent."""
    return fleet.router.table.all()[number].silent


@pytest.mark.parametrize("before", ["never seen", "up", "down"])
def test_endpoint_that_answers_no_probe_is_silent_whatever_it_was(before: str) -> None:
    table = EndpointTable(probe_failures=2)
    table.replace([EndpointSpec("10.0.0.1:8000", "http://10.0.0.1:8000", "node-a")])
    [state] = table.all()
    if before == "up":
        table.mark_up(state)
    if before == "down":
        table.mark_down(state, "refused")
    assert [table.mark_unanswered(state, "no answer") for _ in range(3)] == [False, True, False]
    assert (state.up, state.silent, state.problem) == (False, True, "no answer")
    assert table.any_usable()
    table.mark_down(state, "refused")
    assert not table.any_usable()
    assert not table.mark_unanswered(state, "no answer"), "one late answer is no silence"
    table.mark_up(state)
    assert (state.up, state.silent) == (True, False)


@pytest.mark.parametrize(("unanswered", "silent_now"), [(0, False), (1, True), (5, True)])
def test_endpoint_that_goes_with_probes_unanswered_is_silent_for_what_waits_there(
    unanswered: int, silent_now: bool
) -> None:
    table = EndpointTable(probe_failures=3)
    table.replace([EndpointSpec("10.0.0.1:8000", "http://10.0.0.1:8000", "node-a")])
    [state] = table.all()
    table.mark_up(state)
    for _ in range(unanswered):
        table.mark_unanswered(state, "no answer")
    table.replace([])
    assert (state.up, state.silent) == (False, silent_now)
    assert not table.any_usable()


def test_hung_endpoint_gets_nothing_while_another_is_up_and_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings=PROBES) as fleet:
            hung, well = fleet.engines
            await hung.stop()
            await until(lambda: not fleet.router.table.all()[0].up)
            hung.health_gate.clear()
            hung.gate.clear()
            await hung.start()
            await until(lambda: silent(fleet, 0))
            for number in range(4):
                assert fleet.chosen(await fleet.ask(prompt=f"{number}{LONG}")) == 1
            assert hung.received == []
            assert fleet.metric("kvpool_router_endpoint_silent", endpoint=hung.address) == 1
            assert fleet.metric("kvpool_router_endpoint_up", endpoint=hung.address) == 0
            assert fleet.metric("kvpool_router_endpoint_silent", endpoint=well.address) == 0
            [first, _] = json.loads((await fleet.admin("GET", "/v1/endpoints")).body)
            assert (first["silent"], first["problem"]) == (True, "no answer to GET /health in time")
            hung.health_gate.set()
            await until(lambda: fleet.router.table.all()[0].up)
            assert fleet.metric("kvpool_router_endpoint_silent", endpoint=hung.address) == 0

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_request_at_an_endpoint_that_falls_silent_goes_to_another(tmp_path: Path, stream: bool) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings=PROBES) as fleet:
            for engine in fleet.engines:
                engine.gate.clear()
            asking = asyncio.create_task(fleet.ask(prompt=LONG, stream=stream))
            await until(lambda: any(engine.received for engine in fleet.engines))
            first = next(number for number, engine in enumerate(fleet.engines) if engine.received)
            fleet.engines[1 - first].gate.set()
            fleet.engines[first].health_gate.clear()
            answer = await asking
            assert (answer.status, fleet.chosen(answer), answer.route["reason"]) == (200, 1 - first, "retry")
            assert fleet.metric("kvpool_router_retries_total", cause="silent") == 1
            await asyncio.wait_for(fleet.engines[first].received[0].cancelled.wait(), 5)

    asyncio.run(run())


@pytest.mark.parametrize("second", ["dies", "falls silent"])
def test_endpoint_that_was_silent_is_asked_again_when_it_is_up_and_the_other_fails(tmp_path: Path, second: str) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings=PROBES) as fleet:
            for engine in fleet.engines:
                engine.gate.clear()
            asking = asyncio.create_task(fleet.ask(prompt=LONG))
            await until(lambda: any(engine.received for engine in fleet.engines))
            first = next(number for number, engine in enumerate(fleet.engines) if engine.received)
            recovering, other = fleet.engines[first], fleet.engines[1 - first]
            recovering.health_gate.clear()
            await until(lambda: bool(other.received))
            recovering.health_gate.set()
            recovering.gate.set()
            await until(lambda: fleet.router.table.all()[first].up)
            if second == "dies":
                await other.stop()
            else:
                other.health_gate.clear()
            answer = await asyncio.wait_for(asking, 10)
            assert (answer.status, fleet.chosen(answer)) == (200, first)
            other.health_gate.set()

    asyncio.run(run())


def test_two_endpoints_that_fall_silent_in_turn_are_asked_twice_at_most(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings=PROBES) as fleet:
            for engine in fleet.engines:
                engine.gate.clear()
            asking = asyncio.create_task(fleet.ask(prompt=LONG))
            await until(lambda: any(engine.received for engine in fleet.engines))
            here = next(number for number, engine in enumerate(fleet.engines) if engine.received)
            for asked in (1, 2, 2):
                there = fleet.engines[1 - here]
                fleet.engines[here].health_gate.clear()
                await until(lambda there=there, asked=asked: len(there.received) == asked)  # type: ignore[misc]
                fleet.engines[here].health_gate.set()
                here = 1 - here
                await until(lambda here=here: fleet.router.table.all()[1 - here].up)  # type: ignore[misc]
            fleet.engines[here].health_gate.clear()
            await until(lambda: fleet.router.table.all()[here].unanswered > 4)
            assert [len(engine.received) for engine in fleet.engines] == [2, 2]
            fleet.engines[here].gate.set()
            assert (await asyncio.wait_for(asking, 10)).status == 200
            fleet.engines[here].health_gate.set()

    asyncio.run(run())


def test_model_that_nobody_lists_goes_to_an_endpoint_that_is_up_and_not_to_a_hung_newcomer(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings=PROBES) as fleet:
            hung, well = fleet.engines
            await hung.stop()
            await until(lambda: not fleet.router.table.all()[0].up)
            fleet.router.table.all()[0].models = None  # as of an endpoint that never answered
            hung.health_gate.clear()
            hung.gate.clear()
            await hung.start()
            await until(lambda: silent(fleet, 0))
            answer = await asyncio.wait_for(fleet.ask(prompt=LONG, model="just-loaded"), 10)
            assert (answer.status, fleet.chosen(answer)) == (200, 1)
            assert hung.received == []
            await well.stop()
            await until(lambda: not fleet.router.table.all()[1].up)
            asking = asyncio.create_task(fleet.ask(prompt=LONG, model="just-loaded"))
            await until(lambda: bool(hung.received))  # the only one that may serve it
            hung.gate.set()
            assert (await asking).status == 200
            hung.health_gate.set()

    asyncio.run(run())


def test_request_waits_on_a_silent_endpoint_where_no_other_is_up(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1, settings=PROBES) as fleet:
            [engine] = fleet.engines
            engine.gate.clear()
            engine.health_gate.clear()
            await until(lambda: silent(fleet, 0))
            asking = asyncio.create_task(fleet.ask(prompt=LONG))
            await until(lambda: bool(engine.received))
            await until(lambda: fleet.router.table.all()[0].unanswered > 4)
            assert not asking.done()
            engine.gate.set()
            assert (await asking).status == 200
            assert len(engine.received) == 1

    asyncio.run(run())


def test_models_are_not_asked_of_silent_endpoints_while_another_is_up(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings=PROBES) as fleet:
            fleet.engines[0].models = [{"id": "other", "object": "model"}]
            fleet.engines[0].health_gate.clear()
            await until(lambda: silent(fleet, 0))
            async with fleet.client.get(f"{fleet.url}/v1/models") as answer:
                assert [card["id"] for card in (await answer.json())["data"]] != ["other"]

    asyncio.run(run())
