"""The router: Deployment, Service, and what they need.

Invariant: none of it exists when `spec.routing.mode` is Disabled.
"""

from __future__ import annotations

import yaml

from kvpool_operator import names
from kvpool_operator.names import Manifest
from kvpool_operator.plan import pods
from kvpool_operator.pool import Pool
from kvpool_operator.settings import Settings

HTTP_PORT = 8080
PRESTOP_SECONDS = 5
"""After a pod was taken out of the Service, proxies on the nodes still send it new connections for a moment."""
GRACE_SECONDS = PRESTOP_SECONDS + 30 + 10
"""Requests in flight have the router's own 30 s (timeouts.grace_seconds)."""


def router_yaml(pool: Pool) -> str:
    """The router's configuration file."""
    document = {
        "pool": {"namespace": pool.namespace, "name": pool.name},
        "listen": {"host": "*", "port": HTTP_PORT},
        "admin": {"host": "*", "port": pods.ADMIN_PORT, "token_file": pods.TOKEN_FILE},
        "discovery": {
            "kubernetes": {
                "namespaces_file": pods.NAMESPACES_FILE,
                "token_file": pods.TOKEN_FILE,
                "agent_port": pods.ADMIN_PORT,
            }
        },
    }
    return yaml.safe_dump(document, sort_keys=False)


def is_enabled(pool: Pool) -> bool:
    """Whether the pool has a router."""
    return pool.routing.mode == "Proxy"


def build_config_map(pool: Pool) -> Manifest | None:
    """router.yaml."""
    if not is_enabled(pool):
        return None
    return pods.config_map(pool, names.router_name(pool), names.ROUTER, {"router.yaml": router_yaml(pool)})


def build_service_account(pool: Pool) -> Manifest | None:
    """The routers' identity; it may watch pods where engines may opt in."""
    return pods.service_account(pool, names.router_name(pool), names.ROUTER) if is_enabled(pool) else None


def build_service(pool: Pool) -> Manifest | None:
    """Where clients connect."""
    if not is_enabled(pool):
        return None
    service = pool.routing.service
    metadata = names.metadata(pool, names.router_name(pool), names.ROUTER)
    if service.annotations:
        metadata["annotations"] = dict(service.annotations)
    port = {"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": service.kind,
            "selector": names.selector(pool, names.ROUTER),
            "ports": [port],
            "publishNotReadyAddresses": False,
            "sessionAffinity": "None",
            "internalTrafficPolicy": "Cluster",
            **({"externalTrafficPolicy": "Cluster"} if service.kind != "ClusterIP" else {}),
        },
    }


def build_disruption_budget(pool: Pool) -> Manifest | None:
    """Draining nodes takes one router at a time."""
    return pods.disruption_budget(pool, names.router_name(pool), names.ROUTER) if is_enabled(pool) else None


def build_deployment(pool: Pool, settings: Settings) -> Manifest | None:
    """The routers."""
    if not is_enabled(pool):
        return None
    template = pods.template(pool, names.ROUTER, _pod_spec(pool, settings), config=router_yaml(pool))
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(pool, names.router_name(pool), names.ROUTER),
        "spec": {
            "replicas": pool.routing.replicas,
            "paused": False,
            "minReadySeconds": 0,
            "selector": {"matchLabels": names.selector(pool, names.ROUTER)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "progressDeadlineSeconds": 120,
            "revisionHistoryLimit": 2,
            "template": template,
        },
    }


def _pod_spec(pool: Pool, settings: Settings) -> Manifest:
    return pods.pod_spec(
        pool,
        names.router_name(pool),
        nodeSelector={},
        terminationGracePeriodSeconds=GRACE_SECONDS,
        topologySpreadConstraints=pods.spread(pool, names.ROUTER, per_template=True),
        containers=[_router(settings)],
        volumes=[
            pods.config_map_volume("config", names.router_name(pool)),
            pods.config_map_volume("namespaces", names.namespaces_name(pool)),
            pods.secret_volume("token", names.token_name(pool)),
            pods.api_access_volume(),
        ],
    )


def _router(settings: Settings) -> Manifest:
    return {
        "name": "router",
        "image": settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["kvpool-router", "--config", "/etc/kvpool/router.yaml"],
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": pods.ADMIN_PORT, "protocol": "TCP"},
        ],
        "securityContext": pods.security_context(),
        # an index of 4 million blocks takes some 0.5 GB, the cache of tokens 0.1, request bodies the rest
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "startupProbe": pods.http_probe("/healthz", period_seconds=1, failures=60),
        "livenessProbe": pods.http_probe("/healthz", period_seconds=10, failures=3, timeout_seconds=5),
        "readinessProbe": pods.http_probe("/readyz", period_seconds=2, failures=2),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRESTOP_SECONDS}}},
        "volumeMounts": [pods.CONFIG_MOUNT, pods.NAMESPACES_MOUNT, pods.TOKEN_MOUNT, pods.API_MOUNT],
    }
