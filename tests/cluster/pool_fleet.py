"""A pool with its engines, agents and router in a cluster, as demo and tests use them.

Invariant: everything is asked from the client pod, so what is measured went through pods, Services and cluster DNS.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.waiting import wait_for
from tests.harness.engine_client import EngineClient
from tests.harness.node import settle
from tests.harness.pod_transport import PodTransport

ADMIN_PORT = 8081
ENGINE_SECONDS = 300.0
AGENT_SECONDS = 60.0


class Admin:
    """Admin API of agents and routers, by pod address."""

    def __init__(self, transport: PodTransport, token: str) -> None:
        self._transport = transport
        self._headers = {"authorization": f"Bearer {token}"}

    def get(self, address: str, path: str) -> Any:
        """A GET as JSON; ConnectionError while the other side has begun to listen, but not to serve."""
        return self._ask("GET", address, path, None)

    def post(self, address: str, path: str, body: object) -> Any:
        """A POST as JSON."""
        return self._ask("POST", address, path, body)

    def _ask(self, method: str, address: str, path: str, body: object) -> Any:
        reply = self._transport.request(method, f"http://{address}:{ADMIN_PORT}{path}", body, headers=self._headers)
        if reply.status == 503:
            raise ConnectionError(f"{address}{path}: {reply.body[:300]!r}")
        if reply.status != 200:
            raise ClusterError(f"{address}{path} answered {reply.status}: {reply.body[:300]!r}")
        return reply.json()


def admin_token(cluster: Cluster, name: str, namespace: str) -> str:
    """The bearer token that the operator generated for a pool."""
    secret = cluster.get("secret", f"{name}-token", f"--namespace={namespace}")
    return base64.b64decode(secret["data"]["token"]).decode()


class PoolNode:
    """A node's agent, found anew each time: its pod may have been replaced."""

    def __init__(self, fleet: PoolFleet, name: str) -> None:
        self._fleet = fleet
        self.name = name

    def stats(self) -> Any:
        """The agent's /v1/stats."""
        return self._fleet.admin.get(self._fleet.agent_pod(self.name)["status"]["podIP"], "/v1/stats")

    def settle(self) -> None:
        """Wait until every store is done."""
        settle(self.name, self.stats)


class PoolRouter:
    """The router's Service, and the admin API of its replicas."""

    def __init__(self, fleet: PoolFleet, url: str) -> None:
        self._fleet = fleet
        self.url = url

    def get(self, path: str) -> Any:
        """A GET of one replica's admin API."""
        return self._fleet.admin.get(self._addresses()[0], path)

    def explain(self, body: object) -> Any:
        """Where a completion would go, by all replicas; `endpoint` is "" where they differ."""
        answers = [self._fleet.admin.post(address, "/v1/explain", body) for address in self._addresses()]
        same = len({answer["endpoint"] for answer in answers}) == 1
        return {**answers[0], "endpoint": answers[0]["endpoint"] if same else ""}

    def _addresses(self) -> list[str]:
        pods = self._fleet.pods("router")
        return [pod["status"]["podIP"] for pod in pods if is_pod_ready(pod)]


class PoolFleet:
    """`engines`: Deployments by the node that each runs on."""

    def __init__(
        self,
        cluster: Cluster,
        transport: PodTransport,
        *,
        name: str,
        namespace: str,
        engines: Sequence[tuple[str, str]],
    ) -> None:
        self.cluster = cluster
        self.transport = transport
        self.name = name
        self.namespace = namespace
        self.admin = Admin(transport, admin_token(cluster, name, namespace))
        pool = cluster.get("kvcachepool", name, f"--namespace={namespace}")
        self.router = PoolRouter(self, pool["status"]["routing"]["url"])
        self.nodes = [PoolNode(self, node) for _, node in engines]
        self.engines = [self.engine(deployment) for deployment, _ in engines]

    def engine(self, deployment: str) -> EngineClient:
        """A Deployment's engine, once it is Ready; the pod must have been given the connector."""

        def ready() -> Any:
            labels = self.cluster.get("deployment", deployment, f"--namespace={self.namespace}")
            app = labels["spec"]["selector"]["matchLabels"]["app"]
            pods = self.cluster.get("pods", f"--namespace={self.namespace}", f"--selector=app={app}")["items"]
            return next((pod for pod in pods if is_pod_ready(pod)), None)

        pod = wait_for(ready, seconds=ENGINE_SECONDS, what=f"a Ready pod of deployment {deployment}")
        annotations = pod["metadata"].get("annotations", {})
        if "kvpool.io/injected" not in annotations:
            raise ClusterError(f"pod {pod['metadata']['name']} was not given the connector: {annotations}")
        endpoint = f"{pod['status']['podIP']}:{annotations['kvpool.io/port']}"
        return EngineClient(deployment, endpoint, served_name="model", transport=self.transport)

    def pods(self, component: str) -> list[Any]:
        """The pool's pods of a component that are not going."""
        selector = f"kvpool.io/pool={self.name},app.kubernetes.io/component={component}"
        found = self.cluster.get("pods", f"--namespace={self.namespace}", f"--selector={selector}")["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def agent_pod(self, node: str) -> Any:
        """The agent's pod on a node."""
        for pod in self.pods("agent"):
            if pod["spec"].get("nodeName") == node:
                return pod
        raise ClusterError(f"no agent pod on node {node}")

    def restart_agents(self) -> None:
        """SIGKILL every agent's container; ends when the new ones serve. Holders go on."""
        before = {pod["metadata"]["name"]: restarts(pod, "agent") for pod in self.pods("agent")}
        for name in before:
            self.cluster.kill_container(self.namespace, name, "agent")
        wait_for(
            lambda: all(
                restarts(pod, "agent") > before[pod["metadata"]["name"]] and is_pod_ready(pod)
                for pod in self.pods("agent")
            ),
            seconds=AGENT_SECONDS,
            what="agents restarted and Ready",
        )


def is_pod_ready(pod: Any) -> bool:
    """Whether the pod is Ready and stays."""
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def restarts(pod: Any, container: str) -> int:
    """How often a container was started anew."""
    statuses = [*pod["status"].get("containerStatuses", []), *pod["status"].get("initContainerStatuses", [])]
    return sum(int(status["restartCount"]) for status in statuses if status["name"] == container)
