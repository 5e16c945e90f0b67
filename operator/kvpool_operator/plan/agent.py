"""The agents: one pod on each chosen node, holder as a native sidecar.

Invariant: memory request = limit and covers the arena, so that a node never promises one byte of it twice; the arena is
the holder's, so it outlives the agent's container.
"""

from __future__ import annotations

import yaml

from kvpool_operator import names
from kvpool_operator.names import Manifest
from kvpool_operator.plan import pods
from kvpool_operator.pool import Pool
from kvpool_operator.settings import Settings
from kvpool_operator.valkey.acl import AGENT
from kvpool_operator.valkey.config import PORT

MIB = 1 << 20
HOLDER_OVERHEAD_BYTES = 96 * MIB
HOLDER_OVERHEAD_DIVISOR = 256
"""The kernel's own index of the arena's pages is charged too: 2.2 MiB per GiB; 4 leave room."""
AGENT_MEMORY_BYTES = 384 * MIB
AGENT_MEMORY_DIVISOR = 64
"""Per GiB of arena: 2 MiB of page tables, 8 of slot table when every record is used, the rest for Python's view of it."""
DEFAULT_CPU_REQUEST = "100m"
DRAIN_SECONDS = 10
"""After SIGTERM: time for blocks that wait to be written to Valkey."""
GRACE_SECONDS = DRAIN_SECONDS + 20
STARTUP_BASE_SECONDS = 60
SOCKET_FOLDER = "/run/kvpool"
HOLDER_FOLDER = "/run/kvpool-holder"
CREDENTIALS_FOLDER = "/etc/kvpool-valkey"
GPU_TAINTS = ("nvidia.com/gpu", "amd.com/gpu", "habana.ai/gaudi", "gpu.intel.com/i915", "gpu.intel.com/xe")
"""Taints by which GPU nodes keep other pods away; agents belong there."""


def image(pool: Pool, settings: Settings) -> str:
    """The agents' image: the pool's own, else the operator's release."""
    return pool.agent.image or settings.image


def tolerations(pool: Pool) -> list[Manifest]:
    """The taints of the nodes where agents belong."""
    return [{"key": key, "operator": "Exists"} for key in GPU_TAINTS] + list(pool.agent.tolerations)


def holder_memory_bytes(pool: Pool) -> int:
    """The holder's limit: the arena and what keeping it costs."""
    return pool.capacity_bytes + HOLDER_OVERHEAD_BYTES + pool.capacity_bytes // HOLDER_OVERHEAD_DIVISOR


def agent_memory_bytes(pool: Pool) -> int:
    """The agent container's limit: its overhead, the arena is charged to the holder."""
    return AGENT_MEMORY_BYTES + pool.capacity_bytes // AGENT_MEMORY_DIVISOR


def pod_memory_bytes(pool: Pool) -> int:
    """What a node must have free for an agent pod."""
    return holder_memory_bytes(pool) + agent_memory_bytes(pool)


def agent_yaml(pool: Pool) -> str:
    """The agent's configuration file."""
    document = {
        "pool": {"namespace": pool.namespace, "name": pool.name},
        "socket_folder": SOCKET_FOLDER,
        "holder_socket": f"{HOLDER_FOLDER}/holder.sock",
        "admin": {"host": "*", "port": pods.ADMIN_PORT, "token_file": pods.TOKEN_FILE},
        "ram": {"capacity": pool.capacity},
        "authentication": "kubernetes",
        "allowed_namespaces_file": pods.NAMESPACES_FILE,
        "drain_seconds": DRAIN_SECONDS,
    }
    valkey = _valkey_section(pool)
    if valkey is not None:
        document["valkey"] = valkey
    return yaml.safe_dump(document, sort_keys=False)


def _valkey_section(pool: Pool) -> Manifest | None:
    section: Manifest = {"key_prefix": names.key_prefix(pool), "topology": "Auto"}
    if pool.managed is not None:
        endpoint = f"{names.valkey_name(pool)}.{pool.namespace}.svc:{PORT}"
        password = f"{CREDENTIALS_FOLDER}/agent-password"
        return {"endpoints": [endpoint], "topology": "Cluster", **_without_topology(section)} | {
            "username": AGENT,
            "password_file": password,
        }
    if pool.external is not None:
        section = {"endpoints": list(pool.external.endpoints), **section}
        if pool.external.secret_name:
            section["username_file"] = f"{CREDENTIALS_FOLDER}/username"
            section["password_file"] = f"{CREDENTIALS_FOLDER}/password"
        return section
    return None


def _without_topology(section: Manifest) -> Manifest:
    return {key: value for key, value in section.items() if key != "topology"}


def build_config_map(pool: Pool) -> Manifest:
    """agent.yaml."""
    return pods.config_map(pool, names.agent_name(pool), names.AGENT, {"agent.yaml": agent_yaml(pool)})


def build_namespaces(pool: Pool, allowed: tuple[str, ...]) -> Manifest:
    """Who may opt in, one name a line; read anew by agents and routers when it changes."""
    text = "".join(f"{name}\n" for name in allowed)
    return pods.config_map(pool, names.namespaces_name(pool), names.AGENT, {"allowed": text})


def build_service_account(pool: Pool) -> Manifest:
    """The agents' identity; it may review tokens."""
    return pods.service_account(pool, names.agent_name(pool), names.AGENT)


def build_daemon_set(pool: Pool, settings: Settings) -> Manifest:
    """The agents. `OnDelete`: the operator replaces outdated pods itself, one at a time."""
    template = pods.template(pool, names.AGENT, _pod_spec(pool, settings), config=agent_yaml(pool))
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": names.metadata(pool, names.agent_name(pool), names.AGENT),
        "spec": {
            "selector": {"matchLabels": names.selector(pool, names.AGENT)},
            "updateStrategy": {"type": "OnDelete"},
            "minReadySeconds": 0,
            "revisionHistoryLimit": 2,
            "template": template,
        },
    }


def _pod_spec(pool: Pool, settings: Settings) -> Manifest:
    spec = pool.agent
    return pods.pod_spec(
        pool,
        names.agent_name(pool),
        nodeSelector=dict(spec.node_selector),
        tolerations=tolerations(pool),
        affinity=spec.affinity or None,
        priorityClassName=spec.priority_class_name or None,
        terminationGracePeriodSeconds=GRACE_SECONDS,
        initContainers=[_socket_folder(pool, settings), _holder(pool, settings)],
        containers=[_agent(pool, settings)],
        volumes=_volumes(pool),
    )


def _socket_folder(pool: Pool, settings: Settings) -> Manifest:
    """The only root container: the kubelet makes hostPath folders root's, and fsGroup never applies to them."""
    return {
        "name": "socket-folder",
        **_image(pool, settings),
        "command": ["chown", f"{names.RUN_AS}:{names.RUN_AS}", SOCKET_FOLDER],
        "securityContext": {
            **pods.security_context(),
            "runAsUser": 0,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
        },
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "32Mi"}},
        "volumeMounts": [{"name": "socket", "mountPath": SOCKET_FOLDER}],
    }


def _holder(pool: Pool, settings: Settings) -> Manifest:
    memory = str(holder_memory_bytes(pool))
    return {
        "name": "holder",
        **_image(pool, settings),
        "restartPolicy": "Always",
        "command": ["kvpool-holder", "--socket", f"{HOLDER_FOLDER}/holder.sock"],
        "securityContext": pods.security_context(),
        "resources": {"requests": {"cpu": "10m", "memory": memory}, "limits": {"memory": memory}},
        "volumeMounts": [{"name": "holder", "mountPath": HOLDER_FOLDER}],
    }


def _agent(pool: Pool, settings: Settings) -> Manifest:
    memory = str(agent_memory_bytes(pool))
    limits = {"memory": memory, **({"cpu": pool.agent.cpu_limit} if pool.agent.cpu_limit else {})}
    cpu = pool.agent.cpu_request or pool.agent.cpu_limit or DEFAULT_CPU_REQUEST
    credentials = [{"name": "valkey", "mountPath": CREDENTIALS_FOLDER, "readOnly": True}]
    return {
        "name": "agent",
        **_image(pool, settings),
        "command": ["kvpool-agent", "--config", "/etc/kvpool/agent.yaml"],
        "env": [pods.field_env("KVPOOL_NODE", "spec.nodeName")],
        "ports": [{"name": "admin", "containerPort": pods.ADMIN_PORT, "protocol": "TCP"}],
        "securityContext": pods.security_context(),
        "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": limits},
        "startupProbe": pods.http_probe("/healthz", period_seconds=2, failures=startup_seconds(pool) // 2),
        "livenessProbe": pods.http_probe("/healthz", period_seconds=10, failures=6, timeout_seconds=5),
        "readinessProbe": pods.http_probe("/readyz", period_seconds=2, failures=2),
        "volumeMounts": [
            pods.CONFIG_MOUNT,
            pods.NAMESPACES_MOUNT,
            pods.TOKEN_MOUNT,
            pods.API_MOUNT,
            {"name": "socket", "mountPath": SOCKET_FOLDER},
            {"name": "holder", "mountPath": HOLDER_FOLDER},
            *(credentials if _has_credentials(pool) else []),
        ],
    }


def startup_seconds(pool: Pool) -> int:
    """Time for an agent to listen: it answers /healthz before it prefaults, but mapping a huge arena stalls it a while."""
    return STARTUP_BASE_SECONDS + pool.capacity_bytes // (1 << 30)


def _image(pool: Pool, settings: Settings) -> Manifest:
    return {"image": image(pool, settings), "imagePullPolicy": pool.agent.image_pull_policy}


def _has_credentials(pool: Pool) -> bool:
    return pool.managed is not None or (pool.external is not None and bool(pool.external.secret_name))


def _volumes(pool: Pool) -> list[Manifest]:
    volumes = [
        pods.config_map_volume("config", names.agent_name(pool)),
        pods.config_map_volume("namespaces", names.namespaces_name(pool)),
        pods.secret_volume("token", names.token_name(pool)),
        pods.api_access_volume(),
        {"name": "socket", "hostPath": {"path": names.host_folder(pool), "type": "DirectoryOrCreate"}},
        {"name": "holder", "emptyDir": {"sizeLimit": "1Mi"}},
    ]
    if pool.managed is not None:
        volumes.append(pods.secret_volume("valkey", names.valkey_name(pool), "agent-password"))
    elif pool.external is not None and pool.external.secret_name:
        volumes.append(pods.secret_volume("valkey", pool.external.secret_name))
    return volumes
