"""The managed Valkey: a StatefulSet whose pods are the shards of one cluster.

Invariant: none of it exists unless `spec.valkey.managed` is given; no pod holds a password outside its Secret. Forming and
healing the cluster is `kvpool_operator.valkey`'s business.
"""

from __future__ import annotations

from kvpool_operator import names
from kvpool_operator.names import Manifest
from kvpool_operator.plan import pods
from kvpool_operator.pool import ManagedValkey, Pool
from kvpool_operator.settings import Settings
from kvpool_operator.valkey.acl import acl_rules
from kvpool_operator.valkey.config import BUS_PORT, CONFIG_FOLDER, DATA_FOLDER, PORT, SECRET_FOLDER, valkey_conf

CPU_REQUEST = "100m"
GRACE_SECONDS = 10
"""Nothing is saved at the end."""


def config_text(managed: ManagedValkey) -> str:
    """valkey.conf."""
    return valkey_conf(limit_bytes=managed.memory_per_shard_bytes)


def build_config_map(pool: Pool) -> Manifest | None:
    """valkey.conf in a ConfigMap."""
    if pool.managed is None:
        return None
    return pods.config_map(pool, names.valkey_name(pool), names.VALKEY, {"valkey.conf": config_text(pool.managed)})


def build_service_account(pool: Pool) -> Manifest | None:
    """An identity without rights."""
    return None if pool.managed is None else pods.service_account(pool, names.valkey_name(pool), names.VALKEY)


def build_service(pool: Pool) -> Manifest | None:
    """Headless, with pods that are not ready: shards must meet before any of them is."""
    if pool.managed is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(pool, names.valkey_name(pool), names.VALKEY),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "sessionAffinity": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector(pool, names.VALKEY),
            "ports": [
                {"name": "valkey", "port": PORT, "targetPort": "valkey", "protocol": "TCP"},
                {"name": "bus", "port": BUS_PORT, "targetPort": "bus", "protocol": "TCP"},
            ],
        },
    }


def build_disruption_budget(pool: Pool) -> Manifest | None:
    """Draining nodes takes one shard at a time."""
    return None if pool.managed is None else pods.disruption_budget(pool, names.valkey_name(pool), names.VALKEY)


def build_stateful_set(pool: Pool, settings: Settings, *, replicas: int) -> Manifest | None:
    """The shards. `replicas`: at least the wanted shards; more while one that goes still holds slots."""
    if pool.managed is None:
        return None
    spec = _pod_spec(pool, pool.managed, settings)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": names.metadata(pool, names.valkey_name(pool), names.VALKEY),
        "spec": {
            "replicas": replicas,
            "serviceName": names.valkey_name(pool),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
            "minReadySeconds": 0,
            "ordinals": {"start": 0},
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": names.selector(pool, names.VALKEY)},
            "template": pods.template(pool, names.VALKEY, spec, config=config_text(pool.managed) + acl_rules()),
        },
    }


def _pod_spec(pool: Pool, managed: ManagedValkey, settings: Settings) -> Manifest:
    return pods.pod_spec(
        pool,
        names.valkey_name(pool),
        nodeSelector={},
        terminationGracePeriodSeconds=GRACE_SECONDS,
        topologySpreadConstraints=pods.spread(pool, names.VALKEY, per_template=False),
        containers=[_server(managed, settings)],
        volumes=[
            pods.config_map_volume("config", names.valkey_name(pool)),
            pods.secret_volume("secret", names.valkey_name(pool), "users.acl", "replication.conf"),
            {"name": "data", "emptyDir": {"sizeLimit": "64Mi"}},  # nodes.conf: outlives the container, not the pod
        ],
    )


def _server(managed: ManagedValkey, settings: Settings) -> Manifest:
    memory = str(managed.memory_per_shard_bytes)
    ping = {"exec": {"command": ["valkey-cli", "-t", "2", "ping"]}, "timeoutSeconds": 5}
    return {
        "name": "valkey",
        "image": settings.valkey_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["valkey-server", f"{CONFIG_FOLDER}/valkey.conf", "--cluster-announce-ip", "$(KVPOOL_POD_IP)"],
        "env": [pods.field_env("KVPOOL_POD_IP", "status.podIP")],
        "ports": [
            {"name": "valkey", "containerPort": PORT, "protocol": "TCP"},
            {"name": "bus", "containerPort": BUS_PORT, "protocol": "TCP"},
        ],
        "workingDir": DATA_FOLDER,
        "securityContext": pods.security_context(),
        "resources": {"requests": {"cpu": CPU_REQUEST, "memory": memory}, "limits": {"memory": memory}},
        # PING without a password is answered with an error: an answer all the same, and valkey-cli ends 0
        "startupProbe": {**ping, "periodSeconds": 1, "failureThreshold": 60},
        "readinessProbe": {**ping, "periodSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**ping, "periodSeconds": 10, "failureThreshold": 6},
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
            {"name": "data", "mountPath": DATA_FOLDER},
        ],
    }
