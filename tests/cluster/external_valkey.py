"""A Valkey server that is not the operator's, as a pool's `spec.valkey.external`."""

from __future__ import annotations

from tests.cluster.cluster import Cluster
from tests.cluster.workloads import Manifest

PORT = 6379
NAME = "external-valkey"


def external_valkey(cluster: Cluster, namespace: str, password: str) -> str:
    """A standalone server with a password, Ready; returns host:port. Its Secret has the same name."""
    labels = {"app": NAME}
    metadata = {"name": NAME, "namespace": namespace}
    pod: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "valkey",
                    "image": cluster.image("valkey"),
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["valkey-server", "--requirepass", password, "--save", "", "--dir", "/tmp"],
                    "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
                }
            ],
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": labels, "ports": [{"port": PORT}]},
    }
    cluster.apply(pod, service, basic_auth(NAME, namespace, password))
    cluster.kubectl("wait", f"pod/{NAME}", f"--namespace={namespace}", "--for=condition=Ready", "--timeout=60s")
    return f"{NAME}.{namespace}.svc:{PORT}"


def basic_auth(name: str, namespace: str, password: str) -> Manifest:
    """What `authSecretRef` names."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "type": "kubernetes.io/basic-auth",
        "stringData": {"username": "default", "password": password},
    }
