"""The router's admin API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvpool_router import reasons
from tests.unit.router_stubs import Answer, gpu, hashes_of, prompt, running_fleet, tier, until

LONG = prompt("long", 40)


def _json(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


@pytest.mark.parametrize("path", ["/v1/endpoints", "/v1/index", "/v1/explain"])
@pytest.mark.parametrize("token", ["", "wrong"])
def test_everything_but_health_and_metrics_needs_the_token(tmp_path: Path, path: str, token: str) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1) as fleet:
            method = "POST" if path == "/v1/explain" else "GET"
            assert (await fleet.admin(method, path, token=token)).status == 401

    asyncio.run(run())


def test_rotated_token_is_honoured_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1) as fleet:
            (tmp_path / "admin-token").write_text("next\n")
            assert (await fleet.admin("GET", "/v1/index")).status == 401
            assert (await fleet.admin("GET", "/v1/index", token="next")).status == 200

    asyncio.run(run())


def test_health_readiness_and_metrics_are_open(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            await fleet.ask(prompt=LONG)
            assert (await fleet.admin("GET", "/healthz", token="")).status == 200
            assert (await fleet.admin("GET", "/readyz", token="")).status == 200
            metrics = (await fleet.admin("GET", "/metrics", token="")).body.decode()
            assert 'kvpool_router_requests_total{code="200",reason="affinity"} 1.0' in metrics
            for name in ("route_seconds_count", "index_entries", "endpoint_up", "running_requests", "agent_in_step"):
                assert f"kvpool_router_{name}" in metrics
            fleet.router.draining = True
            assert (await fleet.admin("GET", "/readyz", token="")).status == 503

    asyncio.run(run())


def test_router_without_a_ready_endpoint_is_not_ready(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1) as fleet:
            await fleet.engines[0].stop()
            await until(lambda: not fleet.router.table.any_usable())
            assert (await fleet.admin("GET", "/readyz", token="")).status == 503
            assert (await fleet.admin("GET", "/healthz", token="")).status == 200

    asyncio.run(run())


def test_explain_tells_the_scores_of_every_endpoint_and_sends_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[1].publish(stored=[gpu("engine-1", hashes_of(LONG)[:30]), tier("ram", hashes_of(LONG)[:35])])
            await until(lambda: len(fleet.router.fleet.index) == 35)
            told = _json(await fleet.admin("POST", "/v1/explain", model="model", prompt=LONG))
            assert (told["endpoint"], told["reason"]) == (fleet.engines[1].address, "prefix")
            assert (told["prompt_tokens"], told["prompt_blocks"]) == (len(LONG), 40)
            scores = {score["target"]: score for score in told["scores"]}
            assert scores[fleet.engines[1].address]["blocks"] == {"gpu": 30, "ram": 5, "valkey": 0}
            assert scores[fleet.engines[0].address]["seconds"] > scores[fleet.engines[1].address]["seconds"]
            assert not any(engine.received for engine in fleet.engines)

    asyncio.run(run())


def test_explain_refuses_what_is_no_request(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1) as fleet:
            assert (await fleet.admin("POST", "/v1/explain")).status == 400

    asyncio.run(run())


def test_endpoints_and_index_tell_what_is_known(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[0].publish(stored=[gpu("engine-0", [1, 2, 3]), tier("valkey", [1, 2])])
            await until(lambda: len(fleet.router.fleet.index) == 3)
            first = _json(await fleet.admin("GET", "/v1/endpoints"))[0]
            assert (first["running"], first["silent"]) == (0, False)
            assert (first["up"], first["models"], first["engines"][0]["gpu_blocks"]) == (True, ["model"], 3)
            index = _json(await fleet.admin("GET", "/v1/index"))
            assert index["entries"] == 3
            assert index["agents"]["node-0"]["blocks"] == {"gpu": 3, "ram": 0, "valkey": 2}
            assert index["agents"]["node-1"]["in_step"] is True

    asyncio.run(run())


def test_every_reason_is_listed_once() -> None:
    names = [value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)]
    assert sorted(names) == sorted(reasons.ALL_REASONS)
    assert len(set(names)) == len(names)
