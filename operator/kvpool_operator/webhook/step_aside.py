"""When the webhook steps aside whatever the engine is: namespace, pool and kind of pod (DESIGN section 10). Pure.

Each check answers a Skip or None; the first Skip wins. Invariant: a pod that passes can start wherever it could before.
"""

from __future__ import annotations

import posixpath
import re

from kvpool_operator.webhook.contract import (
    CONNECTOR_PATH,
    CONNECTOR_VOLUME,
    INIT_CONTAINER,
    SOCKET_PATH,
    SOCKET_VOLUME,
    TOKEN_PATH,
    TOKEN_VOLUME,
    Manifest,
    engine_labels,
)
from kvpool_operator.webhook.placement import may_land
from kvpool_operator.webhook.pod_security import enforced_level
from kvpool_operator.webhook.skip_reasons import (
    DISAGGREGATED_ROLE,
    IMAGE_MISSING_ON_NODE,
    LABEL_TAKEN,
    MOUNT_PATH_TAKEN,
    NAME_TAKEN,
    NAMESPACE_NOT_ALLOWED,
    NAMESPACE_UNKNOWN,
    NO_READY_AGENT,
    NOT_A_PREDICTOR,
    POD_SECURITY,
    POOL_BEING_DELETED,
    POOL_NOT_FOUND,
    PULL_SECRET_MISSING,
    SANDBOXED_RUNTIME,
    STATIC_POD,
    USER_NAMESPACE,
    WINDOWS_POD,
    Skip,
)
from kvpool_operator.webhook.views import NamespaceFacts, NodeView, PoolView

_SANDBOXES = re.compile(r"gvisor|runsc|kata|firecracker|sandbox|confidential|coco|wasm|hyperv", re.IGNORECASE)
_RUN = re.compile(r"^/var/run(?=/|$)")


def check_namespace(facts: NamespaceFacts | None, name: str) -> Skip | None:
    """The namespace is known, and lets pods have hostPath volumes as far as its labels say."""
    if facts is None:
        return Skip(NAMESPACE_UNKNOWN, f"the operator does not know namespace {name} yet: create the pod again")
    level = enforced_level(facts.labels)
    if level != "privileged":
        return Skip(
            POD_SECURITY,
            f"namespace {name} enforces Pod Security level {level}, which refuses the hostPath volume of the agent's socket: "
            "run the engine in a namespace without that level",
        )
    return None


def check_pool(pool: PoolView | None, reference: tuple[str, str], namespace: str) -> Skip | None:
    """The pool is there, stays, and lets this namespace in."""
    text = "/".join(reference)
    if pool is None:
        return Skip(POOL_NOT_FOUND, f"there is no KVCachePool {text}: create it, or correct the annotation")
    if pool.is_deleting:
        return Skip(POOL_BEING_DELETED, f"KVCachePool {text} is being deleted")
    if pool.allowed_namespaces is not None and namespace not in pool.allowed_namespaces:
        return Skip(
            NAMESPACE_NOT_ALLOWED, f"KVCachePool {text} does not allow namespace {namespace}: see its allowedNamespaces"
        )
    return None


def choose_image(pod: Manifest, pool: PoolView, namespace: str) -> PoolView | Skip:
    """The pool with the first image that can be had wherever the pod may land: engine and agent may be one release apart."""
    skip = check_image(pod, pool, namespace)
    if skip is None:
        return pool
    return next((each for each in pool.former_images if check_image(pod, each, namespace) is None), skip)


def check_image(pod: Manifest, pool: PoolView, namespace: str) -> Skip | None:
    """The init container's image can be had wherever the pod may land; else the pod would wait for it for ever."""
    if pool.ready_agents == 0:
        return Skip(
            NO_READY_AGENT,
            f"no agent of KVCachePool {pool.namespace}/{pool.name} is Ready with image {pool.image}: "
            "look at the pool's conditions, and make the pod again once agents are Ready with it",
        )
    without = next((node.name for node in pool.nodes_without_image if may_land(pod, node)), None)
    if without is not None:
        return Skip(
            IMAGE_MISSING_ON_NODE,
            f"the agent on node {without} cannot get image {pool.image}, and the pod may land there: "
            "make the image available, or keep the pod off that node",
        )
    unproven = next((node.name for node in _unproven_nodes(pool) if may_land(pod, node)), None)
    if unproven is not None:
        return Skip(
            IMAGE_MISSING_ON_NODE,
            f"no agent has shown that node {unproven} has or can get image {pool.image}, and the pod may land there: "
            "let the pool's agents run there too, or keep the pod off that node",
        )
    own = {secret.get("name") for secret in pod.get("spec", {}).get("imagePullSecrets") or []}
    missing = [name for name in pool.image_pull_secrets if name not in own]
    if missing and namespace != pool.namespace:
        return Skip(
            PULL_SECRET_MISSING,
            f"image {pool.image} needs pull secret {missing[0]}: create it in {namespace} and name it in imagePullSecrets",
        )
    return None


def _unproven_nodes(pool: PoolView) -> list[NodeView]:
    """Nodes that may lack the image for ever.

    An image that is never pulled is only where an agent runs it. One that is pulled can be had from everywhere, as far as
    no agent's experience says otherwise, and where nodes are of a kind for which it was made.
    """
    unproven = [node for node in pool.nodes if node.name not in pool.nodes_with_image]
    if pool.image_pull_policy == "Never" or pool.nodes_without_image:
        return unproven
    proven = {_platform(node) for node in pool.nodes if node.name in pool.nodes_with_image}
    return [node for node in unproven if proven and _platform(node) not in proven]


def _platform(node: NodeView) -> tuple[str | None, ...]:
    return tuple(node.labels.get(f"kubernetes.io/{kind}") for kind in ("os", "arch"))


def check_kind(pod: Manifest) -> Skip | None:
    """Pods in which an injected engine could not start, or that are no engines."""
    metadata, spec = pod.get("metadata", {}), pod.get("spec", {})
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if "kubernetes.io/config.mirror" in annotations:
        return Skip(STATIC_POD, "the pod is a node's static pod, which cannot be changed: use a Deployment")
    if (spec.get("os") or {}).get("name") == "windows" or (spec.get("nodeSelector") or {}).get(
        "kubernetes.io/os"
    ) == "windows":
        return Skip(WINDOWS_POD, "the pod is for Windows nodes, agents run on Linux")
    runtime = spec.get("runtimeClassName") or ""
    if _SANDBOXES.search(runtime):
        return Skip(
            SANDBOXED_RUNTIME, f"runtimeClassName {runtime} runs pods in a sandbox that cannot share the node's arena"
        )
    if spec.get("hostUsers") is False:
        return Skip(USER_NAMESPACE, "hostUsers is false: the socket's folder may not be mountable in a user namespace")
    return _check_role(labels)


def _check_role(labels: dict[str, str]) -> Skip | None:
    component = labels.get("component", "")
    if "serving.kserve.io/inferenceservice" in labels and component in ("transformer", "explainer"):
        return Skip(
            NOT_A_PREDICTOR, f"the pod is the InferenceService's {component}: it inherits the labels of its predictor"
        )
    role = labels.get("llm-d.ai/role", "")
    if role in ("prefill", "decode") or labels.get("app.kubernetes.io/component", "").endswith("workload-prefill"):
        return Skip(
            DISAGGREGATED_ROLE,
            f"the pod has the disaggregated role {role or 'prefill'}, whose own connector must not be replaced",
        )
    return None


def check_names(pod: Manifest, container: Manifest) -> Skip | None:
    """Names and paths are free. A mount above or below ours could be read-only, or hide it."""
    spec = pod.get("spec", {})
    names = {each.get("name") for each in spec.get("volumes") or []} & {CONNECTOR_VOLUME, SOCKET_VOLUME, TOKEN_VOLUME}
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    names |= {each.get("name") for each in containers} & {INIT_CONTAINER}
    if names:
        return Skip(NAME_TAKEN, f"the pod has its own volume or container named {min(map(str, names))}: rename it")
    for mount in [*(container.get("volumeMounts") or []), *(container.get("volumeDevices") or [])]:
        path = str(mount.get("mountPath") or mount.get("devicePath") or "")
        if any(_meet(path, ours) for ours in (CONNECTOR_PATH, SOCKET_PATH, TOKEN_PATH)):
            return Skip(
                MOUNT_PATH_TAKEN,
                f"container {container.get('name')} mounts {path}, where the connector, socket or token has to lie: move it",
            )
    return None


def check_labels(pod: Manifest, pool: PoolView) -> Skip | None:
    """Our labels are free. A changed one would take the pod from its ReplicaSet, which would make another, without end."""
    own = pod.get("metadata", {}).get("labels") or {}
    for name, value in engine_labels(pool.namespace, pool.name).items():
        if own.get(name, value) != value:
            return Skip(
                LABEL_TAKEN, f"the pod's label {name} is {own[name]}, an engine of the pool needs {value}: remove it"
            )
    return None


def _meet(path: str, ours: str) -> bool:
    """Whether one lies in the other; /var/run is a link to /run in most images. A relative path is one below /."""
    path = posixpath.normpath(f"/./{path}")
    return any(
        _contains(one, other) or _contains(other, one)
        for one in (path, _RUN.sub("/run", path))
        for other in (ours, _RUN.sub("/run", ours))
    )


def _contains(folder: str, path: str) -> bool:
    return (path.rstrip("/") + "/").startswith(folder.rstrip("/") + "/")
