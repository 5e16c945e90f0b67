"""What the pods of all parts have in common: users, capabilities, volumes, probes.

Invariant: every container made from these runs as a non-root user, on a read-only root, without capabilities and under
the runtime's seccomp profile.
"""

from __future__ import annotations

from typing import Any

from kvpool_operator import names
from kvpool_operator.names import Manifest
from kvpool_operator.pool import Pool

SECRET_MODE = 0o440
"""Secrets are read by the pod's group (fsGroup) and by nobody else."""
CONFIG_MOUNT = {"name": "config", "mountPath": "/etc/kvpool", "readOnly": True}
NAMESPACES_MOUNT = {"name": "namespaces", "mountPath": "/etc/kvpool-namespaces", "readOnly": True}
TOKEN_MOUNT = {"name": "token", "mountPath": "/etc/kvpool-token", "readOnly": True}
API_MOUNT = {"name": "api-access", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}

NAMESPACES_FILE = "/etc/kvpool-namespaces/allowed"
TOKEN_FILE = "/etc/kvpool-token/token"
ADMIN_PORT = 8081


def security_context() -> Manifest:
    """Of every container but the one that owns the socket folder."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_security_context() -> Manifest:
    """Of every pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": names.RUN_AS,
        "runAsGroup": names.RUN_AS,
        "fsGroup": names.RUN_AS,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def template(pool: Pool, component: str, spec: Manifest, *, config: object) -> Manifest:
    """A pod template whose annotation says by a hash when pods are outdated. `config`: what its pods read at start."""
    annotation = {names.CONFIG_HASH: names.digest({"spec": spec, "config": config})}
    return {"metadata": {"labels": names.labels(pool, component), "annotations": annotation}, "spec": spec}


def pod_spec(pool: Pool, service_account: str, **parts: Any) -> Manifest:
    """A pod's spec with what all pods of a pool share; `parts` with a value of None are left out."""
    secrets = [{"name": name} for name in pool.agent.image_pull_secrets]
    return {
        "serviceAccountName": service_account,
        "automountServiceAccountToken": False,  # whoever talks to the API server mounts `api-access` by name
        "enableServiceLinks": False,
        "securityContext": pod_security_context(),
        **({"imagePullSecrets": secrets} if secrets else {}),
        **{name: value for name, value in parts.items() if value is not None},
    }


def config_map_volume(name: str, config_map: str) -> Manifest:
    """A ConfigMap as a volume."""
    return {"name": name, "configMap": {"name": config_map}}


def secret_volume(name: str, secret: str, *keys: str) -> Manifest:
    """A Secret, or only some of its keys, as a volume."""
    items = {"items": [{"key": key, "path": key} for key in keys]} if keys else {}
    return {"name": name, "secret": {"secretName": secret, "defaultMode": SECRET_MODE, **items}}


def api_access_volume() -> Manifest:
    """The service account's token as the kubelet would mount it, for those containers only that need it."""
    return {
        "name": "api-access",
        "projected": {
            "defaultMode": SECRET_MODE,
            "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                {
                    "downwardAPI": {
                        "items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}],
                    }
                },
            ],
        },
    }


def http_probe(path: str, *, period_seconds: int, failures: int, timeout_seconds: int = 3) -> Manifest:
    """A probe of the admin port."""
    return {
        "httpGet": {"path": path, "port": "admin"},
        "periodSeconds": period_seconds,
        "failureThreshold": failures,
        "timeoutSeconds": timeout_seconds,
    }


def field_env(name: str, path: str) -> Manifest:
    """An environment variable from the downward API."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def service_account(pool: Pool, name: str, component: str) -> Manifest:
    """A ServiceAccount whose token is mounted nowhere by itself."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": names.metadata(pool, name, component),
        "automountServiceAccountToken": False,
    }


def disruption_budget(pool: Pool, name: str, component: str) -> Manifest:
    """At most one pod of the component goes at a time when nodes are drained; a broken one never blocks a drain."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(pool, name, component),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": names.selector(pool, component)},
        },
    }


def config_map(pool: Pool, name: str, component: str, data: dict[str, str]) -> Manifest:
    """A ConfigMap."""
    metadata = names.metadata(pool, name, component)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def spread(pool: Pool, component: str, *, per_template: bool) -> list[Manifest]:
    """Over nodes, as far as there are some. `per_template`: old and new pods of a rollout are counted apart."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": names.selector(pool, component)},
            **({"matchLabelKeys": ["pod-template-hash"]} if per_template else {}),
        }
    ]
