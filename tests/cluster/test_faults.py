"""While 200 requests run through the router's Service, parts are killed: only what was in flight on them may fail, all heals."""

from __future__ import annotations

import os
import random
import signal
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.installation import (
    SYSTEM,
    ensure_namespace,
    is_ready,
    pool_manifest,
    read_pool,
    wait_pool_ready,
)
from tests.cluster.pool_fleet import PoolFleet, is_pod_ready
from tests.cluster.waiting import wait_for
from tests.cluster.workloads import Runtime, plain_deployment, predictor_deployment
from tests.harness.pod_transport import PodTransport
from tests.harness.request_load import RequestLoad

NAMESPACE = "test-faults"
CLIENTS = 2
REQUESTS = 200
HEAL_SECONDS = 60.0
NODE_DOWN_SECONDS = 120.0
PLAIN, PREDICTOR = "llama", "llama-vllm-predictor"


@pytest.fixture(scope="module")
def fleet(operator: Cluster, client: PodTransport) -> Iterator[PoolFleet]:
    """Two engines, two agents, three shards, two routers."""
    operator.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=90s")
    ensure_namespace(operator, NAMESPACE)
    valkey = {"managed": {"shards": 3, "memoryPerShard": "128Mi"}}
    operator.apply(pool_manifest("chat", NAMESPACE, capacity="256Mi", valkey=valkey))
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
    fleet = PoolFleet(
        operator, client, name="chat", namespace=NAMESPACE, engines=[(PLAIN, node_a), (PREDICTOR, node_b)]
    )
    for engine in fleet.engines:
        engine.wait_identified()
    yield fleet
    operator.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def request_load(fleet: PoolFleet, count: int) -> RequestLoad:
    """Through the router's Service, from inside the cluster; many prompts share a start."""
    chosen = random.Random(5)

    def text(length: int) -> str:
        return "".join(chosen.choice(string.ascii_lowercase) for _ in range(length))

    bases = [text(256) for _ in range(8)]
    prompts = [chosen.choice(bases) + text(chosen.randrange(20, 200)) for _ in range(count)]
    return RequestLoad(fleet.transport, fleet.router.url, model="model", prompts=prompts, clients=CLIENTS)


class Faults:
    """Does one thing to the pool at a time, and waits until the pool is Ready again and has said what it was."""

    def __init__(self, fleet: PoolFleet) -> None:
        self._fleet = fleet
        self._cluster = fleet.cluster

    @contextmanager
    def named(self, *reasons: str, seconds: float = HEAL_SECONDS) -> Iterator[None]:
        """What is done inside shows as one of these reasons, in an Event or a condition, and is healed in time."""
        before = self._seen()
        yield
        found: set[str] = set()

        def shows() -> bool:
            found.update(self._seen() - before)
            return any(said.partition(" ")[0] in reasons for said in found)

        wait_for(shows, seconds=seconds, what=f"one of {reasons} is named", explain=lambda: sorted(found))
        self.healed(seconds)

    def healed(self, seconds: float = HEAL_SECONDS) -> None:
        """Every part is as many as it should be and Ready."""

        def is_whole() -> bool:
            counts = {part: sum(map(is_pod_ready, self._fleet.pods(part))) for part in ("agent", "router", "valkey")}
            return counts == {"agent": 2, "router": 2, "valkey": 3} and is_ready(
                read_pool(self._cluster, "chat", NAMESPACE)
            )

        wait_for(is_whole, seconds=seconds, what="the pool is whole", explain=self._conditions)

    def pod(self, part: str) -> str:
        return str(self._fleet.pods(part)[0]["metadata"]["name"])

    def kill(self, part: str, container: str) -> None:
        self._cluster.kill_container(NAMESPACE, self.pod(part), container)

    def delete(self, *arguments: str) -> None:
        self._cluster.kubectl("delete", "pod", *arguments, f"--namespace={NAMESPACE}", "--wait=false")

    def _seen(self) -> set[str]:
        """Reasons with what tells two of them apart: count of Events, time of conditions."""
        events = self._cluster.get("events", f"--namespace={NAMESPACE}")["items"]
        said = {
            f"{e['reason']} {e['metadata']['uid']} {e.get('count')} {e.get('series')}"
            for e in events
            if e.get("involvedObject", {}).get("kind") == "KVCachePool"
        }
        conditions = read_pool(self._cluster, "chat", NAMESPACE)["status"]["conditions"]
        return said | {f"{c['reason']} {c['type']} {c['lastTransitionTime']}" for c in conditions}

    def _conditions(self) -> Any:
        conditions = read_pool(self._cluster, "chat", NAMESPACE)["status"]["conditions"]
        return "; ".join(f"{c['type']}={c['status']} {c['reason']}: {c['message']}" for c in conditions)


def test_parts_are_killed_under_load(fleet: PoolFleet) -> None:
    cluster, faults = fleet.cluster, Faults(fleet)
    load = request_load(fleet, REQUESTS)
    load.start()
    with faults.named("ContainerRestarted"):
        faults.kill("agent", "agent")
    with faults.named("ContainerRestarted"):
        faults.kill("agent", "holder")
    with faults.named("ContainerRestarted", "ShardMissing", "ClusterHealing", "ValkeyHealed"):
        faults.kill("valkey", "valkey")
    with faults.named("PodsStarting", "AgentNotReady", "AgentReplaced", "ArenaPending", "AgentsStarting"):
        faults.delete(faults.pod("agent"))
    with faults.named("ShardMissing", "ClusterHealing", "ValkeyHealed"):
        faults.delete(faults.pod("valkey"))
    with faults.named("ShardMissing", "ClusterHealing", "ValkeyHealed", "ClusterForming"):
        faults.delete("--selector=app.kubernetes.io/component=valkey")

    leader = cluster.get("lease", "--namespace", SYSTEM)["items"][0]["spec"]["holderIdentity"]
    operators = cluster.get("pods", f"--namespace={SYSTEM}", "--selector=app.kubernetes.io/component=operator")["items"]
    leading = next(pod["metadata"]["name"] for pod in operators if pod["metadata"]["name"] in leader)
    cluster.kill_container(SYSTEM, leading, "operator")
    faults.healed()

    before = time.monotonic()
    with faults.named("ContainerRestarted"):
        faults.kill("router", "router")
        killed = time.monotonic()
    load.join()
    assert load.done == REQUESTS
    load.assert_only_in_flight_failed(before, killed + 1)


def test_a_node_out_of_reach_for_two_minutes_comes_back(fleet: PoolFleet) -> None:
    """Its kubelet and containerd stop; its containers go on, and requests with them."""
    cluster, faults = fleet.cluster, Faults(fleet)
    faults.healed()
    load = request_load(fleet, 40)
    node = cluster.nodes[1]
    cluster.stop_node(node)
    stopped = time.monotonic()
    try:
        with faults.named("NodeNotReady", seconds=NODE_DOWN_SECONDS + HEAL_SECONDS):
            load.start()
            load.join()
            time.sleep(max(0.0, NODE_DOWN_SECONDS - (time.monotonic() - stopped)))
            cluster.start_node(node)
    except BaseException:
        cluster.start_node(node)
        raise
    assert load.failures == []
    faults.healed()


def test_renewed_passwords_and_token_are_taken_up_by_all_parts(fleet: PoolFleet) -> None:
    """As docs/operations.md says, while requests run."""
    cluster, faults = fleet.cluster, Faults(fleet)
    faults.healed()
    uid = read_pool(cluster, "chat", NAMESPACE)["metadata"]["uid"]
    load = request_load(fleet, 60)
    load.start()
    with faults.named("ValkeyUnauthenticated", "ValkeyHealed", seconds=2 * HEAL_SECONDS):
        cluster.kubectl("delete", "secret", f"kvpool-{uid}", f"--namespace={SYSTEM}")
    load.join()
    assert load.failures == []
    renewed = PoolFleet(
        cluster,
        fleet.transport,
        name="chat",
        namespace=NAMESPACE,
        engines=[(PLAIN, cluster.nodes[0]), (PREDICTOR, cluster.nodes[1])],
    )
    wait_for(
        lambda: all(node.stats()["valkey"]["state"] == "connected" for node in renewed.nodes),
        seconds=2 * HEAL_SECONDS,
        what="agents that take the new token and use Valkey with the new password",
    )


def test_a_leader_stopped_past_its_lease_writes_nothing_after_its_successor(fleet: PoolFleet) -> None:
    cluster = fleet.cluster
    identity = cluster.get("lease", "--namespace", SYSTEM)["items"][0]["spec"]["holderIdentity"]
    operators = cluster.get("pods", f"--namespace={SYSTEM}", "--selector=app.kubernetes.io/component=operator")["items"]
    leading = next(pod["metadata"]["name"] for pod in operators if pod["metadata"]["name"] in identity)
    pid = cluster.container_pid(SYSTEM, leading, "operator")
    os.kill(pid, signal.SIGSTOP)
    try:

        def has_successor() -> bool:
            return bool(cluster.get("lease", "--namespace", SYSTEM)["items"][0]["spec"]["holderIdentity"] != identity)

        wait_for(has_successor, seconds=60, what="another leader")
        cluster.kubectl("annotate", "kvpool", "chat", f"--namespace={NAMESPACE}", "test/poke=1", "--overwrite")
        offset = cluster.audit_log.stat().st_size
        time.sleep(5)  # time for the successor's first writes
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_pool_ready(cluster, "chat", NAMESPACE)
    time.sleep(5)  # what the stopped one would write, it writes now
    with cluster.audit_log.open() as log:
        log.seek(offset)
        lines = log.readlines()
    written = [line for line in lines if '"kvcachepools"' in line or NAMESPACE in line]
    ours = [
        line
        for line in written
        if "kvpool-operator" in line and any(f'"verb":"{v}"' in line for v in ("patch", "create", "update", "delete"))
    ]
    assert ours, "the successor's writes are in the audit log"
    assert all(leading not in line for line in ours), [line[:300] for line in ours if leading in line]


def test_the_operator_killed_at_random_moments_converges_to_the_same_objects(fleet: PoolFleet) -> None:
    from tests.cluster.owned import essence, owned

    cluster, chosen = fleet.cluster, random.Random(11)
    before = essence(owned(cluster, "chat", NAMESPACE))
    for number in range(50):
        cluster.kubectl("annotate", "kvpool", "chat", f"--namespace={NAMESPACE}", f"test/poke={number}", "--overwrite")
        if number % 5 == 0:
            cluster.kubectl("delete", "configmap", "chat-router", f"--namespace={NAMESPACE}", "--ignore-not-found")
        time.sleep(chosen.uniform(0.0, 0.4))
        for pod in cluster.get("pods", f"--namespace={SYSTEM}", "--selector=app.kubernetes.io/component=operator")[
            "items"
        ]:
            if any("running" in s["state"] for s in pod["status"].get("containerStatuses", [])):
                try:
                    cluster.kill_container(SYSTEM, pod["metadata"]["name"], "operator")
                except (OSError, RuntimeError):
                    continue
    wait_for(
        lambda: essence(owned(cluster, "chat", NAMESPACE)) == before,
        seconds=120,
        what="the same objects as before",
        explain=lambda: set(essence(owned(cluster, "chat", NAMESPACE)).items()) ^ set(before.items()),
    )
    wait_pool_ready(cluster, "chat", NAMESPACE)
