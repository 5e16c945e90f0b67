"""The pieces of an injected pod: init container, volumes, mounts. Pure.

Invariant: a piece that is there already, by its name, is left as it is.
"""

from __future__ import annotations

from kvpool_operator.webhook.contract import (
    CONNECTOR_PATH,
    CONNECTOR_VOLUME,
    INIT_CONTAINER,
    SOCKET_PATH,
    SOCKET_VOLUME,
    TOKEN_PATH,
    TOKEN_SECONDS,
    TOKEN_VOLUME,
    Manifest,
    token_audience,
)
from kvpool_operator.webhook.engine_command import Engine
from kvpool_operator.webhook.views import PoolView

INIT_USER = 65532


def has_named(entries: list[Manifest] | None, name: str) -> bool:
    """Whether a list of the pod has an entry of that name."""
    return any(entry.get("name") == name for entry in entries or [])


def _add(entries: list[Manifest], new: Manifest) -> None:
    if not has_named(entries, new["name"]):
        entries.append(new)


def build_init_container(pod: Manifest, engine: Engine, pool: PoolView, resources: Manifest) -> Manifest:
    """Copies the connector. Restricted in every way that Pod Security knows.

    It runs as the engine's user where that is a number, so that the kubelet gives projected tokens the same owner and mode
    as before. The image is there already: its agent runs it; pulling it anew could only keep the engine from starting.
    """
    return {
        "name": INIT_CONTAINER,
        "image": pool.image,
        "imagePullPolicy": "Never" if pool.image_pull_policy == "Never" else "IfNotPresent",
        "command": ["kvpool-inject"],
        "args": ["--to", CONNECTOR_PATH],
        **({"resources": resources} if resources else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _user(pod, engine.container),
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": CONNECTOR_VOLUME, "mountPath": CONNECTOR_PATH}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _user(pod: Manifest, container: Manifest) -> int:
    own = (container.get("securityContext") or {}).get("runAsUser")
    shared = (pod["spec"].get("securityContext") or {}).get("runAsUser")
    user = own if own is not None else shared
    return user if isinstance(user, int) and user > 0 else INIT_USER


def add_volumes(spec: Manifest, pool: PoolView) -> None:
    """The folders. The socket's is made by the kubelet where there is no agent: an engine starts there without cache."""
    volumes = spec["volumes"] = spec.get("volumes") or []
    _add(volumes, {"name": CONNECTOR_VOLUME, "emptyDir": {"sizeLimit": "16Mi"}})
    _add(volumes, {"name": SOCKET_VOLUME, "hostPath": {"path": pool.socket_folder, "type": "DirectoryOrCreate"}})
    token = {
        "audience": token_audience(pool.namespace, pool.name),
        "expirationSeconds": TOKEN_SECONDS,
        "path": "token",
    }
    _add(volumes, {"name": TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}})
    if pool.image_pull_secrets:
        secrets = spec["imagePullSecrets"] = spec.get("imagePullSecrets") or []
        for name in pool.image_pull_secrets:
            _add(secrets, {"name": name})


def add_mounts(container: Manifest) -> None:
    """All read-only: connecting to a socket needs no more."""
    mounts = container["volumeMounts"] = container.get("volumeMounts") or []
    paths = {CONNECTOR_VOLUME: CONNECTOR_PATH, SOCKET_VOLUME: SOCKET_PATH, TOKEN_VOLUME: TOKEN_PATH}
    for name, path in paths.items():
        _add(mounts, {"name": name, "mountPath": path, "readOnly": True})
