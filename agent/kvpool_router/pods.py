"""Which pods are endpoints and agents of a pool.

Pure. Invariants: only what the webhook injected is an endpoint (it alone sets the role's label): an engine that it left out
has neither agent nor known hashes, and is served by its own Service; agents are believed only in the pool's own namespace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvpool_core.namespace_file import AllowedNamespaces
from kvpool_router.addresses import join_address
from kvpool_router.config import KubernetesDiscovery
from kvpool_router.discovery import AgentAddress, EndpointSpec, Members

POOL_LABEL = "kvpool.io/pool"
POOL_NAMESPACE_LABEL = "kvpool.io/pool-namespace"
ROLE_LABEL = "kvpool.io/role"
COMPONENT_LABEL = "app.kubernetes.io/component"
PORT_ANNOTATION = "kvpool.io/port"

ENGINE = "engine"
AGENT = "agent"


@dataclass(frozen=True, slots=True)
class Pod:
    """What routing needs of a pod. `role`: ENGINE, AGENT or "". `runs`: has an address, runs, and is not being deleted."""

    namespace: str
    name: str
    created: str
    role: str
    node: str
    ip: str
    port: int
    runs: bool
    ready: bool


def selector(namespace: str, pool: str) -> str:
    """The label selector of a pool's pods."""
    return f"{POOL_LABEL}={pool},{POOL_NAMESPACE_LABEL}={namespace}"


def project_pod(manifest: dict[str, Any]) -> Pod:
    """The projection of a Pod; a field that is absent is empty."""
    metadata, spec, status = (manifest.get(part) or {} for part in ("metadata", "spec", "status"))
    ip = str(status.get("podIP") or "")
    conditions = status.get("conditions") or ()
    return Pod(
        namespace=str(metadata.get("namespace") or ""),
        name=str(metadata.get("name") or ""),
        created=str(metadata.get("creationTimestamp") or ""),
        role=_role(metadata.get("labels") or {}),
        node=str(spec.get("nodeName") or ""),
        ip=ip,
        port=_port((metadata.get("annotations") or {}).get(PORT_ANNOTATION)),
        runs=bool(ip) and status.get("phase") == "Running" and not metadata.get("deletionTimestamp"),
        ready=any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
    )


def members_of(
    pods: Iterable[Pod], *, allowed: AllowedNamespaces, pool_namespace: str, settings: KubernetesDiscovery
) -> Members:
    """The fleet that these pods make up; of two with one address, or two agents on a node, the newer one counts."""
    endpoints: dict[str, EndpointSpec] = {}
    agents: dict[str, AgentAddress] = {}
    for pod in sorted(pods, key=lambda pod: (pod.created, pod.namespace, pod.name)):
        if pod.role == ENGINE and pod.runs and pod.ready and pod.port and pod.namespace in allowed:
            address = join_address(pod.ip, pod.port)
            endpoints[address] = EndpointSpec(address, f"http://{address}", pod.node)
        elif pod.role == AGENT and pod.runs and pod.namespace == pool_namespace:
            url = f"http://{join_address(pod.ip, settings.agent_port)}"
            agents[pod.node] = AgentAddress(pod.node, url, settings.token_file)
    return Members(
        tuple(endpoints[address] for address in sorted(endpoints)), tuple(agents[node] for node in sorted(agents))
    )


def _role(labels: dict[str, str]) -> str:
    if labels.get(ROLE_LABEL) == ENGINE:
        return ENGINE
    return AGENT if labels.get(COMPONENT_LABEL) == AGENT else ""


def _port(text: object) -> int:
    """The serving port; 0 when it is none."""
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 5:
        return 0
    return int(text) if 1 <= int(text) <= 65535 else 0
