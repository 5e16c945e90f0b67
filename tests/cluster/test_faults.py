"""While requests run through the router's Service, parts are killed: only what was in flight on them may fail, all heals."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import string
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest

from tests.cluster.asking import asking
from tests.cluster.cluster import Cluster
from tests.cluster.installation import (
    SYSTEM,
    ensure_namespace,
    is_ready,
    pool_manifest,
    read_pool,
    wait_pool_ready,
)
from tests.cluster.operators import leader
from tests.cluster.pool_fleet import PoolFleet, is_pod_ready, restarts
from tests.cluster.waiting import wait_for
from tests.cluster.workloads import Runtime, plain_deployment, predictor_deployment
from tests.harness.pod_transport import PodTransport
from tests.harness.request_load import RequestLoad

pytestmark = pytest.mark.local
NAMESPACE = "test-faults"
CLIENTS = 4
REQUESTS = 200
HEAL_SECONDS = 60.0
NODE_DOWN_SECONDS = 120.0
PLAIN, PREDICTOR = "llama", "llama-vllm-predictor"
PARTS = {"agent": 2, "router": 2, "valkey": 3}
POOL = pool_manifest(
    "chat", NAMESPACE, capacity="256Mi", valkey={"managed": {"shards": PARTS["valkey"], "memoryPerShard": "128Mi"}}
)
SHARD_REASONS = ("ShardMissing", "ShardUnreachable", "ClusterForming", "ClusterHealing", "ValkeyHealed", "PodsStarting")
AGENT_REASONS = ("PodsStarting", "AgentNotReady", "ArenaPending", "RollingOut")


@pytest.fixture(scope="module")
def fleet(operator: Cluster, client: PodTransport) -> Iterator[PoolFleet]:
    """Two engines, two agents, three shards, two routers."""
    operator.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=90s")
    ensure_namespace(operator, NAMESPACE)
    operator.apply(POOL)
    wait_pool_ready(operator, "chat", NAMESPACE)
    runtime = Runtime(operator.image("engine"), str(operator.engine_python), tuple(map(str, operator.engine_mounts)))
    model = operator.model("tiny-llama")
    node_a, node_b = operator.nodes[:2]
    manifests = [
        *plain_deployment(
            PLAIN,
            runtime,
            model=model,
            node=node_a,
            labels={"kvpool.io/inject": "true"},
            annotations={"kvpool.io/pool": "chat"},
        ),
        *predictor_deployment(PREDICTOR, runtime, model=model, node=node_b, core="1", pool="chat"),
    ]
    for manifest in manifests:
        manifest["metadata"]["namespace"] = NAMESPACE
    operator.apply(*manifests)
    fleet = open_fleet(operator, client)
    for engine in fleet.engines:
        engine.wait_identified()
    yield fleet
    operator.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def open_fleet(cluster: Cluster, client: PodTransport) -> PoolFleet:
    """As it is now."""
    engines = [(PLAIN, cluster.nodes[0]), (PREDICTOR, cluster.nodes[1])]
    return PoolFleet(cluster, client, name="chat", namespace=NAMESPACE, engines=engines)


def prompts() -> Iterator[str]:
    """Without end; many share a start."""
    chosen = random.Random(5)

    def text(length: int) -> str:
        return "".join(chosen.choice(string.ascii_lowercase) for _ in range(length))

    bases = [text(256) for _ in range(8)]
    return (chosen.choice(bases) + text(chosen.randrange(20, 200)) for _ in itertools.count())


@contextmanager
def requests_running(fleet: PoolFleet) -> Iterator[RequestLoad]:
    """Through the router's Service, from inside the cluster, until the block ends."""
    load = RequestLoad(fleet.transport, fleet.router.url, model="model", prompts=prompts(), clients=CLIENTS)
    load.start()
    try:
        yield load
    finally:
        load.end()


class Said(NamedTuple):
    """What an Event or a condition says; `which` tells two of the same words apart."""

    which: str
    reason: str
    message: str


class Faults:
    """Does one thing to the pool at a time, while requests are in flight, and waits until it was named and healed."""

    def __init__(self, fleet: PoolFleet, load: RequestLoad) -> None:
        self._fleet = fleet
        self._cluster = fleet.cluster
        self._load = load
        self.moments: list[float] = []
        """When something was done (monotonic seconds)."""

    def kill(self, part: str, container: str) -> None:
        """SIGKILL a container of the part's first pod; the container's own Event names it."""
        pod = self._pods(part)[0]
        name, before = pod["metadata"]["name"], restarts(pod, container)
        pid = self._cluster.container_pid(NAMESPACE, name, container)
        said = self._said()
        self._now(lambda: os.kill(pid, signal.SIGKILL))

        def is_back() -> bool:
            found = next(one for one in self._pods(part) if one["metadata"]["name"] == name)
            return restarts(found, container) > before

        self._end(said, ("ContainerRestarted",), rf"\bcontainer {container} of pod {name}\b", is_back)

    def delete(self, part: str, *, count: int, reasons: tuple[str, ...]) -> None:
        """Delete the part's first pods; one at least is named, a shard by its own name or number, an agent by its node's."""
        pods = self._pods(part)[:count]
        names = [pod["metadata"]["name"] for pod in pods]
        uids = {pod["metadata"]["uid"] for pod in pods}
        patterns = [_shard_pattern(name) for name in names]
        if part == "agent":
            patterns = [rf"on node {pod['spec']['nodeName']}\b" for pod in pods]
        about = "|".join(patterns)
        said = self._said()
        self._now(lambda: self._cluster.kubectl("delete", "pod", *names, f"--namespace={NAMESPACE}", "--wait=false"))
        self._end(said, reasons, about, lambda: not uids & {pod["metadata"]["uid"] for pod in self._pods(part)})

    def kill_leader(self) -> None:
        """SIGKILL the leading operator; the Event of the next one to lead, itself or the other, names it."""
        name = leader(self._cluster)
        pid = self._cluster.container_pid(SYSTEM, name, "operator")
        said = self._said()
        self._now(lambda: os.kill(pid, signal.SIGKILL))
        self._end(said, ("LeaderChanged",), "leads now", lambda: True)

    def stop_node(self, node: str) -> None:
        """SIGKILL its kubelet and containerd; ends when the pool has named the node."""
        said = self._said()
        self._now(lambda: self._cluster.stop_node(node))
        self._wait_named(said, ("NodeNotReady",), rf"\b{node}\b", self.moments[-1] + HEAL_SECONDS)

    def renew(self, act: Callable[[], object]) -> None:
        """Shards that refuse the new password are named and replaced one after the other: two minutes for all."""
        said = self._said()
        self._now(act)
        end = self.moments[-1] + 2 * HEAL_SECONDS
        self._wait_named(said, ("ValkeyUnauthenticated", "ValkeyHealed"), r"\bchat-valkey-\d\b", end)
        self.wait_whole(end)

    def wait_whole(self, end: float, is_back: Callable[[], bool] = lambda: True) -> None:
        """Every part is as many as it should be and Ready, and the pool says so, until `end` (monotonic seconds)."""

        def is_whole() -> bool:
            counts = {part: sum(map(is_pod_ready, self._pods(part))) for part in PARTS}
            return is_back() and counts == PARTS and is_ready(read_pool(self._cluster, "chat", NAMESPACE))

        wait_for(is_whole, seconds=end - time.monotonic(), what="the pool is whole", explain=self._conditions)

    def _now(self, act: Callable[[], object]) -> None:
        self._load.wait_in_flight()
        self.moments.append(time.monotonic())
        act()

    def _end(self, said: set[Said], reasons: Sequence[str], pattern: str, back: Callable[[], bool]) -> None:
        """One deadline for the name and the healing."""
        end = self.moments[-1] + HEAL_SECONDS
        self._wait_named(said, reasons, pattern, end)
        self.wait_whole(end, back)

    def _wait_named(self, said: set[Said], reasons: Sequence[str], pattern: str, end: float) -> None:
        """An Event or a condition that was not there before has one of the reasons and the pattern in its message."""
        news: set[Said] = set()

        def is_named() -> bool:
            news.update(self._said() - said)
            return any(re.search(pattern, one.message) for one in news if one.reason in reasons)

        what = f"one of {reasons} names {pattern}"
        wait_for(is_named, seconds=end - time.monotonic(), what=what, explain=lambda: sorted(news))

    def _said(self) -> set[Said]:
        told = "--field-selector=reportingComponent=kvpool-operator"
        events = self._cluster.get("events", "--all-namespaces", told)["items"]
        conditions = read_pool(self._cluster, "chat", NAMESPACE)["status"]["conditions"]
        return {Said(e["metadata"]["uid"], e["reason"], e["message"]) for e in events} | {
            Said(f"{c['type']} {c['lastTransitionTime']}", c["reason"], c["message"]) for c in conditions
        }

    def _pods(self, part: str) -> list[Any]:
        return self._fleet.pods(part)

    def _conditions(self) -> str:
        conditions = read_pool(self._cluster, "chat", NAMESPACE)["status"]["conditions"]
        return "; ".join(f"{c['type']}={c['status']} {c['reason']}: {c['message']}" for c in conditions)


def _shard_pattern(pod: str) -> str:
    """As conditions and Events name a shard: by its pod, or by its number while it has none."""
    return rf"\b{pod}\b|no pod yet for shard [\d, ]*\b{pod.rpartition('-')[2]}\b"


def test_parts_are_killed_under_load(fleet: PoolFleet) -> None:
    with requests_running(fleet) as load:
        faults = Faults(fleet, load)
        faults.kill("agent", "agent")
        faults.kill("agent", "holder")
        faults.kill("valkey", "valkey")
        faults.delete("agent", count=1, reasons=AGENT_REASONS)
        faults.delete("valkey", count=1, reasons=SHARD_REASONS)
        faults.delete("valkey", count=PARTS["valkey"], reasons=SHARD_REASONS)
        faults.kill_leader()
        faults.kill("router", "router")
        router_killed = faults.moments[-1]
        wait_for(lambda: load.done >= REQUESTS, seconds=120, what=f"{REQUESTS} requests")
    assert all(load.in_flight_at(moment) for moment in faults.moments)
    load.assert_only_in_flight_failed(router_killed, router_killed + 1)


def test_a_node_out_of_reach_for_two_minutes_comes_back(fleet: PoolFleet) -> None:
    """Its kubelet and containerd stop; its containers go on, and requests with them."""
    node = fleet.cluster.nodes[1]
    with requests_running(fleet) as load:
        faults = Faults(fleet, load)
        faults.wait_whole(time.monotonic() + HEAL_SECONDS)
        try:
            faults.stop_node(node)
            time.sleep(NODE_DOWN_SECONDS - (time.monotonic() - faults.moments[-1]))
        finally:
            returned = time.monotonic()
            fleet.cluster.start_node(node)
        faults.wait_whole(returned + HEAL_SECONDS)
        load.wait_in_flight()
    assert all(load.in_flight_at(moment) for moment in (*faults.moments, returned))
    assert load.failures == []


def test_renewed_passwords_and_token_are_taken_up_by_all_parts(fleet: PoolFleet) -> None:
    """As docs/operations.md says."""
    cluster = fleet.cluster
    uid = read_pool(cluster, "chat", NAMESPACE)["metadata"]["uid"]
    with requests_running(fleet) as load:
        faults = Faults(fleet, load)
        faults.wait_whole(time.monotonic() + HEAL_SECONDS)
        faults.renew(lambda: cluster.kubectl("delete", "secret", f"kvpool-{uid}", f"--namespace={SYSTEM}"))

        def are_connected() -> bool:
            return all(
                node.stats()["valkey"]["state"] == "connected" for node in open_fleet(cluster, fleet.transport).nodes
            )

        wait_for(are_connected, seconds=2 * HEAL_SECONDS, what="agents with the new token and the new password")
    assert load.in_flight_at(faults.moments[-1])
    assert load.failures == []


def test_engines_answer_on_their_own_services_while_their_pool_goes_and_comes_back(fleet: PoolFleet) -> None:
    def ask(service: str) -> None:
        body = {"model": "model", "prompt": f"a prompt for {service}", "max_tokens": 4}
        reply = fleet.transport.request("POST", f"http://{service}.{NAMESPACE}.svc/v1/completions", body, seconds=30.0)
        assert reply.status == 200, reply

    def are_known() -> bool:
        """To the new agents."""
        known = {
            one["endpoint"]
            for node in open_fleet(fleet.cluster, fleet.transport).nodes
            for one in node.stats()["engines"]
        }
        return known == {engine.endpoint for engine in fleet.engines}

    with asking(partial(ask, PLAIN), partial(ask, PREDICTOR)) as asked:
        fleet.cluster.kubectl("delete", "kvpool", "chat", f"--namespace={NAMESPACE}", "--timeout=60s")
        fleet.cluster.apply(POOL)
        wait_pool_ready(fleet.cluster, "chat", NAMESPACE)
        wait_for(are_known, seconds=2 * HEAL_SECONDS, what="engines that were there before are known to the new agents")
    assert asked.answered
    assert asked.problems == []
