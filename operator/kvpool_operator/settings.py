"""The operator's settings, read once from the environment that the chart writes.

Invariant: a `Settings` that exists is complete; what is wrong with the environment is a ConfigError naming variable and remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool_core.errors import ConfigError

IMAGE_PULL_POLICIES = ("Always", "IfNotPresent", "Never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where the operator runs, what it launches and how often it looks."""

    namespace: str
    """KVPOOL_NAMESPACE: the operator's own namespace; holds its Lease and the master copies of generated Secrets."""
    identity: str
    """KVPOOL_IDENTITY: name of this replica (the pod's name); holder of the Lease."""
    image: str
    """KVPOOL_IMAGE: one image for agent, holder, router, injector and purge."""
    valkey_image: str
    """KVPOOL_VALKEY_IMAGE: image of the managed Valkey; needs `valkey-server` and `valkey-cli` on its PATH."""
    image_pull_policy: str = "IfNotPresent"
    """KVPOOL_IMAGE_PULL_POLICY of router, purge and Valkey; agents have `spec.agent.imagePullPolicy`."""
    service_name: str = "kvpool-operator"
    """KVPOOL_SERVICE_NAME: the Service of the operator's webhook; also names Lease and webhook configuration."""
    watched_namespaces: tuple[str, ...] = ()
    """KVPOOL_WATCH_NAMESPACES, comma separated: pools are served there only; empty = everywhere."""
    agent_cluster_role: str = "kvpool-agent"
    """KVPOOL_AGENT_CLUSTER_ROLE: the ClusterRole made by the chart that lets agents review tokens."""
    router_cluster_role: str = "kvpool-router"
    """KVPOOL_ROUTER_CLUSTER_ROLE: the ClusterRole made by the chart that lets routers watch pods."""
    resync_seconds: float = 60.0
    """KVPOOL_RESYNC_SECONDS: how often each pool is looked at without an event; what a watch missed is put right then."""
    workers: int = 4
    """KVPOOL_WORKERS: pools that are reconciled at the same time; a reconcile mostly waits for the API server."""
    health_port: int = 8081
    """KVPOOL_HEALTH_PORT: /healthz, /readyz, /metrics."""
    webhook_port: int = 9443
    """KVPOOL_WEBHOOK_PORT: the pod webhook, TLS; 0 = no webhook."""
    log_level: str = "INFO"
    """KVPOOL_LOG_LEVEL."""


def read_settings(environment: Mapping[str, str]) -> Settings:
    """The settings of an environment; ConfigError for a missing or wrong variable."""
    policy = environment.get("KVPOOL_IMAGE_PULL_POLICY") or "IfNotPresent"
    if policy not in IMAGE_PULL_POLICIES:
        raise ConfigError(f"KVPOOL_IMAGE_PULL_POLICY is {policy!r}: use one of {', '.join(IMAGE_PULL_POLICIES)}")
    return Settings(
        namespace=_required(environment, "KVPOOL_NAMESPACE", "the operator's namespace"),
        identity=_required(environment, "KVPOOL_IDENTITY", "the pod's name"),
        image=_required(environment, "KVPOOL_IMAGE", "the image of agents and routers"),
        valkey_image=_required(environment, "KVPOOL_VALKEY_IMAGE", "the image of the managed Valkey"),
        image_pull_policy=policy,
        service_name=environment.get("KVPOOL_SERVICE_NAME") or "kvpool-operator",
        watched_namespaces=_names(environment.get("KVPOOL_WATCH_NAMESPACES", "")),
        agent_cluster_role=environment.get("KVPOOL_AGENT_CLUSTER_ROLE") or "kvpool-agent",
        router_cluster_role=environment.get("KVPOOL_ROUTER_CLUSTER_ROLE") or "kvpool-router",
        resync_seconds=_number(environment, "KVPOOL_RESYNC_SECONDS", default=60.0, low=1.0, high=86400.0),
        workers=int(_number(environment, "KVPOOL_WORKERS", default=4, low=1, high=64)),
        health_port=int(_number(environment, "KVPOOL_HEALTH_PORT", default=8081, low=1, high=65535)),
        webhook_port=int(_number(environment, "KVPOOL_WEBHOOK_PORT", default=9443, low=0, high=65535)),
        log_level=environment.get("KVPOOL_LOG_LEVEL") or "INFO",
    )


def _required(environment: Mapping[str, str], name: str, meaning: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise ConfigError(f"{name} is not set: give it {meaning} (the chart does)")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(sorted({name.strip() for name in text.split(",") if name.strip()}))


def _number(environment: Mapping[str, str], name: str, *, default: float, low: float, high: float) -> float:
    text = environment.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: give a number from {low:g} to {high:g}") from None
    if not low <= value <= high:
        raise ConfigError(f"{name} is {text}: give a number from {low:g} to {high:g}")
    return value
