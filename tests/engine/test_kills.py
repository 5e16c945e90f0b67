"""While 200 requests and more run, parts are killed and come back: no request fails that was not in flight on what was killed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.engine.conftest import fresh_prompt, wait_for
from tests.harness import web
from tests.harness.engine import Engine
from tests.harness.engine_client import metric_sum
from tests.harness.request_load import RequestLoad
from tests.harness.stack import Stack

REQUESTS = 200
CLIENTS = 4
BACK_SECONDS = 30.0
MORE = 20
"""Requests between two kills."""


@pytest.fixture
def load(fleet: Stack) -> Iterator[RequestLoad]:
    """Requests that go on through all of the test; many share a start."""
    chosen = random.Random(7)
    bases = [fresh_prompt(256) for _ in range(8)]

    def prompts() -> Iterator[str]:
        while True:
            yield chosen.choice(bases) + fresh_prompt(chosen.randrange(20, 200))

    load = RequestLoad(web, fleet.router.url, model=fleet.engines[0].served_name, prompts=prompts(), clients=CLIENTS)
    load.start()
    yield load
    load.end()


def test_parts_are_killed_under_load(fleet: Stack, load: RequestLoad) -> None:
    kill_agent(fleet, load)
    kill_shard(fleet, load)
    kill_router(fleet, load)
    kill_engine(fleet, load)
    wait_for(lambda: load.done >= REQUESTS, seconds=120, what=f"{REQUESTS} requests done")
    load.end()
    load.assert_only_in_flight_failed()
    for node in fleet.nodes:
        wait_for(lambda n=node: n.stats()["arena"]["leases"] == 0, seconds=15, what="no lease is left")  # type: ignore[misc]
        assert node.stats()["arena"]["slots"].get("writing", 0) == 0


def kill_agent(fleet: Stack, load: RequestLoad) -> None:
    """Its successor takes the arena over and stores again; the router follows its new stream."""
    node, engine = fleet.nodes[0], fleet.engines[0]
    resyncs = router_metric(fleet, "kvpool_router_resyncs_total", agent=node.name)
    wait_for_more(load, fleet, engine)
    node.agent.kill()
    node.agent.start()
    wait_for_as_before(fleet, load, "the agent")
    assert metric_sum(node.metrics(), "kvpool_agent_takeovers_total", result="taken_over") == 1
    assert metric_sum(node.metrics(), "kvpool_agent_taken_over_blocks_total", fate="kept") > 0
    assert router_metric(fleet, "kvpool_router_resyncs_total", agent=node.name) > resyncs
    wait_for(
        lambda: metric_sum(node.metrics(), "kvpool_agent_stored_blocks_total") > 0,
        seconds=BACK_SECONDS,
        what="the new agent stores",
    )


def kill_shard(fleet: Stack, load: RequestLoad) -> None:
    """Agents leave it alone, then use it again."""
    failures = [metric_sum(node.metrics(), "kvpool_valkey_failures_total") for node in fleet.nodes]
    wait_for_more(load, fleet)
    fleet.valkey.kill(1)
    wait_for(lambda: all(map(has_open_breaker, metrics_of_nodes(fleet))), seconds=20, what="the lost shard shows")
    assert load.in_flight > 0
    fleet.valkey.restart(1)
    wait_for_as_before(fleet, load, "the shard")
    for before, text in zip(failures, metrics_of_nodes(fleet), strict=True):
        assert metric_sum(text, "kvpool_valkey_failures_total") > before
        assert metric_sum(text, "kvpool_valkey_connected") == 1


def kill_router(fleet: Stack, load: RequestLoad) -> None:
    """Its successor counts anew, and knows after its first snapshots what lies where."""
    wait_for_more(load, fleet)
    with load.kill():
        fleet.router.program.kill()
    fleet.router.program.start()
    fleet.router.wait_ready()
    wait_for_as_before(fleet, load, "the router")
    assert router_metric(fleet, "kvpool_router_index_entries") > 0
    wait_for(
        lambda: router_metric(fleet, "kvpool_router_requests_total", reason="prefix", code="200") > 0,
        seconds=BACK_SECONDS,
        what="the new router follows prefixes",
    )


def kill_engine(fleet: Stack, load: RequestLoad) -> None:
    """The router passes its requests on; when it is back, it loads what it had stored."""
    engine = fleet.engines[1]
    retries = router_metric(fleet, "kvpool_router_retries_total")
    wait_for_more(load, fleet, engine)
    with load.kill():
        engine.program.kill()
    wait_for(
        lambda: router_metric(fleet, "kvpool_router_endpoint_up", endpoint=engine.endpoint) == 0,
        seconds=BACK_SECONDS,
        what="the router holds the engine to be down",
    )
    wait_for(
        lambda: router_metric(fleet, "kvpool_router_retries_total") > retries,
        seconds=BACK_SECONDS,
        what="requests passed on to the other engine",
    )
    wait_for(
        lambda: metric_sum(fleet.nodes[1].metrics(), "kvpool_agent_engines") == 0,
        seconds=BACK_SECONDS,
        what="its agent has no engine",
    )
    engine.program.start()
    engine.wait_ready()
    wait_for_as_before(fleet, load, "the engine")
    wait_for(
        lambda: engine.metric("kvpool_connector_loaded_tokens_total", tier="ram") > 0,
        seconds=BACK_SECONDS,
        what="the engine loads what it had stored before",
    )


def wait_for_more(load: RequestLoad, fleet: Stack, engine: Engine | None = None) -> None:
    """Wait until more requests were answered, and some are in flight: in the router, or on `engine`."""
    enough = load.done + MORE
    wait_for(lambda: load.done >= enough, seconds=120, what=f"{enough} requests done")
    engines = [engine] if engine else fleet.engines
    wait_for(
        lambda: any(
            e["running"] > 0 for e in fleet.router.get("/v1/endpoints") for o in engines if e["endpoint"] == o.endpoint
        ),
        seconds=20,
        what="requests in flight",
    )
    assert load.in_flight > 0


def wait_for_as_before(fleet: Stack, load: RequestLoad, what: str) -> None:
    """All of it serves, uses and follows the rest, under load."""
    wait_for(lambda: is_as_before(fleet), seconds=BACK_SECONDS, what=f"all is as before {what} was killed")
    assert load.in_flight > 0


def is_as_before(fleet: Stack) -> bool:
    endpoints = {endpoint["endpoint"]: endpoint for endpoint in fleet.router.get("/v1/endpoints")}
    for engine, node in zip(fleet.engines, fleet.nodes, strict=True):
        stats = node.stats()
        known = {e["endpoint"] for e in stats["engines"] if e["state"] == "known"}
        if engine.endpoint not in known or not endpoints[engine.endpoint]["up"]:
            return False
        if stats["valkey"]["state"] != "connected" or has_open_breaker(node.metrics()):
            return False
        if router_metric(fleet, "kvpool_router_agent_in_step", agent=node.name) != 1:
            return False
        if engine.metric("kvpool_connector_domain_known") != 1:
            return False
    return True


def has_open_breaker(metrics: str) -> bool:
    return metric_sum(metrics, "kvpool_valkey_breaker_open") > 0


def metrics_of_nodes(fleet: Stack) -> list[str]:
    return [node.metrics() for node in fleet.nodes]


def router_metric(fleet: Stack, name: str, **labels: str) -> float:
    """The router's count; 0 before it has any."""
    return metric_sum(web.request("GET", f"{fleet.router.admin_url}/metrics").body.decode(), name, **labels)
