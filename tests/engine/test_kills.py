"""While 200 requests run, parts are killed and come back: no request fails that was not in flight on what was killed."""

from __future__ import annotations

import random
import time

from tests.engine.conftest import fresh_prompt, wait_for
from tests.harness import web
from tests.harness.engine import Engine
from tests.harness.engine_client import metric_sum
from tests.harness.request_load import RequestLoad
from tests.harness.stack import Stack

REQUESTS = 200
CLIENTS = 4
BACK_SECONDS = 30.0


def test_parts_are_killed_under_load(fleet: Stack) -> None:
    a, b = fleet.engines
    chosen = random.Random(7)
    bases = [fresh_prompt(256) for _ in range(8)]
    prompts = [chosen.choice(bases) + fresh_prompt(chosen.randrange(20, 200)) for _ in range(REQUESTS)]
    load = RequestLoad(web, fleet.router.url, model=a.served_name, prompts=prompts, clients=CLIENTS)
    load.start()

    wait_for(lambda: load.done >= 20, seconds=120, what="20 requests done")
    fleet.nodes[0].agent.kill()
    fleet.nodes[0].agent.start()
    wait_for(lambda: is_served(fleet, 0), seconds=BACK_SECONDS, what="the agent serves its engine again")

    wait_for(lambda: load.done >= 50, seconds=120, what="50 requests done")
    fleet.valkey.kill(1)
    wait_for(lambda: has_open_breaker(fleet), seconds=20, what="the lost shard shows")
    fleet.valkey.restart(1)
    wait_for(lambda: is_valkey_well(fleet), seconds=BACK_SECONDS, what="the shard is used again")

    wait_for(lambda: load.done >= 80, seconds=120, what="80 requests done")
    kill_begins = time.monotonic()
    fleet.router.program.kill()
    router_dead = time.monotonic()
    fleet.router.program.start()
    fleet.router.wait_ready()

    wait_for(lambda: load.done >= 110, seconds=120, what="110 requests done")
    b.program.kill()
    b.program.start()
    load.join()
    b.wait_ready()
    wait_for(lambda: is_routed(fleet, b), seconds=BACK_SECONDS, what="the router uses the engine again")
    b.wait_identified()

    assert load.done == REQUESTS
    load.assert_only_in_flight_failed(kill_begins, router_dead)

    assert metric_sum(fleet.nodes[0].metrics(), "kvpool_agent_taken_over_blocks_total", fate="kept") > 0
    text = web.request("GET", f"{fleet.router.admin_url}/metrics").body.decode()
    assert metric_sum(text, "kvpool_router_requests_total") > 0
    for node in fleet.nodes:
        wait_for(lambda n=node: n.stats()["arena"]["leases"] == 0, seconds=15, what="no lease is left")  # type: ignore[misc]
        assert node.stats()["arena"]["slots"].get("writing", 0) == 0


def is_served(fleet: Stack, index: int) -> bool:
    """Whether a node's agent knows its engine's domain."""
    endpoint = fleet.engines[index].endpoint
    return any(
        e["endpoint"] == endpoint and e["state"] == "known" for e in fleet.nodes[index].stats().get("engines", [])
    )


def has_open_breaker(fleet: Stack) -> bool:
    return any(metric_sum(node.metrics(), "kvpool_valkey_breaker_open") > 0 for node in fleet.nodes)


def is_valkey_well(fleet: Stack) -> bool:
    states = [node.stats()["valkey"]["state"] for node in fleet.nodes]
    return states == ["connected"] * len(states) and not has_open_breaker(fleet)


def is_routed(fleet: Stack, engine: Engine) -> bool:
    """Whether the router holds an engine to be up."""
    return any(e["endpoint"] == engine.endpoint and e["up"] for e in fleet.router.get("/v1/endpoints"))
