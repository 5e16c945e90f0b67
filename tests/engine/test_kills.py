"""While 200 requests run, parts are killed and come back: no request fails that was not in flight on what was killed."""

from __future__ import annotations

import http.client
import random
import threading
import time
from dataclasses import dataclass, field

from tests.engine.conftest import fresh_prompt, wait_for
from tests.harness import web
from tests.harness.engine import Engine
from tests.harness.engine_client import metric_sum
from tests.harness.stack import Stack

REQUESTS = 200
CLIENTS = 4
RETRY_SECONDS = 60.0
BACK_SECONDS = 30.0


@dataclass(slots=True)
class Load:
    """Clients that go through the router and retry only connections that were refused."""

    url: str
    model: str
    prompts: list[str]
    done: int = 0
    failures: list[tuple[float, float, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """One client: takes prompts until there are none."""
        while True:
            with self.lock:
                if not self.prompts:
                    return
                prompt = self.prompts.pop()
            started = time.monotonic()
            problem = self._ask(prompt, started)
            with self.lock:
                self.done += 1
                if problem:
                    self.failures.append((started, time.monotonic(), problem))

    def _ask(self, prompt: str, started: float) -> str:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        while True:
            try:
                reply = web.request("POST", f"{self.url}/v1/completions", body)
            except ConnectionRefusedError:
                if time.monotonic() - started > RETRY_SECONDS:
                    return "refused for too long"
                time.sleep(0.05)
                continue
            except (OSError, http.client.HTTPException) as error:
                return f"{type(error).__name__}: {error}"
            return "" if reply.status == 200 else f"status {reply.status}: {reply.body[:200]!r}"


def test_parts_are_killed_under_load(fleet: Stack) -> None:
    a, b = fleet.engines
    chosen = random.Random(7)
    bases = [fresh_prompt(256) for _ in range(8)]
    prompts = [chosen.choice(bases) + fresh_prompt(chosen.randrange(20, 200)) for _ in range(REQUESTS)]
    load = Load(fleet.router.url, a.served_name, prompts)
    threads = [threading.Thread(target=load.run) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()

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
    for thread in threads:
        thread.join()
    b.wait_ready()
    wait_for(lambda: is_routed(fleet, b), seconds=BACK_SECONDS, what="the router uses the engine again")
    b.wait_identified()

    assert load.done == REQUESTS
    in_flight = [f for f in load.failures if f[0] <= router_dead and f[1] >= kill_begins]
    unexcused = [f for f in load.failures if f not in in_flight]
    assert not unexcused, f"failed though not in flight on the killed router: {unexcused}"
    assert len(load.failures) <= 2 * CLIENTS, "one in flight per client, and one into the dying router's backlog"

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
