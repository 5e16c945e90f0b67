"""Names and values that an injected pod carries: annotations, labels, volumes, paths, flags and environment of the engine.

Invariant: agent, router, connector and status look for exactly these (DESIGN sections 7, 10 and 14).
"""

from __future__ import annotations

import json
from typing import Any, Final

Manifest = dict[str, Any]
"""An object as the API server gives and takes it."""

INJECT_LABEL: Final = "kvpool.io/inject"
ROLE_LABEL: Final = "kvpool.io/role"
ENGINE_ROLE: Final = "engine"
POOL: Final = "kvpool.io/pool"
"""Annotation by which a pod names its pool (`name` or `namespace/name`); label with the name on an injected pod."""
POOL_NAMESPACE_LABEL: Final = "kvpool.io/pool-namespace"
CONTAINER_ANNOTATION: Final = "kvpool.io/container"
PORT_ANNOTATION: Final = "kvpool.io/port"
INJECTED_ANNOTATION: Final = "kvpool.io/injected"
SKIPPED_ANNOTATION: Final = "kvpool.io/skip-reason"

INIT_CONTAINER: Final = "kvpool-inject"
CONNECTOR_VOLUME: Final = "kvpool-connector"
SOCKET_VOLUME: Final = "kvpool-socket"
TOKEN_VOLUME: Final = "kvpool-token"

CONNECTOR_PATH: Final = "/opt/kvpool-connector"
SOCKET_PATH: Final = "/run/kvpool"
TOKEN_PATH: Final = "/var/run/secrets/kvpool"
TOKEN_SECONDS: Final = 3600
"""Life of the engine's token; the kubelet renews it at 80 %."""

DEFAULT_PORT: Final = 8000
"""vLLM's own."""
SUPPORTED_VLLM: Final = (0, 32)
"""The minor version of vLLM that this release's connector is for; `kvpool_vllm.support` holds the same (a test compares)."""

TRANSFER_FLAG: Final = "--kv-transfer-config"
EVENTS_FLAG: Final = "--kv-events-config"
HASH_FLAG: Final = "--prefix-caching-hash-algo"
HASH_ALGORITHM: Final = "sha256_cbor"


def _compact(value: Manifest) -> str:
    return json.dumps(value, separators=(",", ":"))


TRANSFER_CONFIG: Final = _compact(
    {
        "kv_connector": "KvpoolConnector",
        "kv_connector_module_path": "kvpool_vllm.entry",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"canonical_layout": True, "offload_prompt_only": False},
    }
)
EVENTS_CONFIG: Final = _compact({"enable_kv_cache_events": True, "publisher": "null"})


def engine_labels(namespace: str, pool: str) -> dict[str, str]:
    """Labels by which routers and status find an engine of the pool."""
    return {POOL: pool, POOL_NAMESPACE_LABEL: namespace, ROLE_LABEL: ENGINE_ROLE}


def token_audience(namespace: str, pool: str) -> str:
    """Audience of the token by which an engine of the pool proves its pod."""
    return f"kvpool.io/{namespace}/{pool}"
