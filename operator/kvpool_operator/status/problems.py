"""Why a pod is not ready, or was never made, and what to do about it.

Pure. Invariant: every message names the object and the remedy; the first reason that fits is the most actionable one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kvpool_operator import reasons
from kvpool_operator.observed import Container, Node, Pod, WarningEvent, Workload
from kvpool_operator.status.condition import Problem

IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
CRASH_REASONS = frozenset({"CrashLoopBackOff", "RunContainerError", "CreateContainerError"})
_MISSING = re.compile(r"(secret|configmap) \"?(?P<name>[^\"\s]+)\"? not found|references non-existent secret key")
_INSUFFICIENT_MEMORY = "Insufficient memory"
_GIB = 1 << 30


def gibibytes(size: int) -> str:
    """A size for people."""
    return f"{size / _GIB:.4g}Gi"


def creation_problem(workload: Workload | None, warnings: Iterable[WarningEvent]) -> Problem | None:
    """Why a controller cannot make the pods that are missing."""
    if workload is None or (workload.existing >= workload.desired and not workload.failure):
        return None
    told = [
        one
        for one in warnings
        if one.reason in ("FailedCreate", "FailedDaemonPod")
        and (one.object_uid == workload.uid or _is_replica_set_of(one, workload))
    ]
    newest = max(told, key=lambda one: one.last_seen, default=None)
    message = workload.failure or (newest.message if newest else "")
    return _refused(f"{workload.kind} {workload.name}", message) if message else None


def _is_replica_set_of(event: WarningEvent, workload: Workload) -> bool:
    return (
        workload.kind == "Deployment"
        and event.object_kind == "ReplicaSet"
        and event.object_name.startswith(f"{workload.name}-")
    )


def _refused(what: str, message: str) -> Problem:
    if "exceeded quota" in message or "failed quota" in message:
        return Problem(
            reasons.QUOTA_EXCEEDED,
            f"{what}: a ResourceQuota of the namespace refuses a pod: raise the quota or make the pool smaller: {message}",
        )
    if "violates PodSecurity" in message:
        return Problem(
            reasons.POD_REFUSED,
            f"{what}: Pod Security refuses the pod, which needs a hostPath: label the namespace "
            f"pod-security.kubernetes.io/enforce=privileged: {message}",
        )
    return Problem(
        reasons.POD_REFUSED, f"{what}: the API server refuses a pod: allow what the message names: {message}"
    )


def pod_problem(
    pod: Pod, warnings: Iterable[WarningEvent], nodes: Mapping[str, Node], *, memory_bytes: int = 0
) -> Problem:
    """Why a pod is not ready. `memory_bytes`: what it asks for, when that comes from the pool's capacity."""
    checks = (
        _schedule_problem(pod, nodes, memory_bytes),
        _node_problem(pod, nodes),
        _image_problem(pod),
        _missing_problem(pod, warnings),
        _crash_problem(pod),
    )
    found = next((problem for problem in checks if problem is not None), None)
    return found or _starting(pod)


def _schedule_problem(pod: Pod, nodes: Mapping[str, Node], memory_bytes: int) -> Problem | None:
    if not pod.unscheduled:
        return None
    wanted = _wanted_node(pod, nodes)
    if memory_bytes and _INSUFFICIENT_MEMORY in pod.unscheduled:
        size = f" {wanted.name} has {gibibytes(wanted.memory_bytes)} allocatable" if wanted else " no node has it free"
        return Problem(
            reasons.CAPACITY_EXCEEDS_NODE,
            f"pod {pod.name} needs {gibibytes(memory_bytes)} of memory for spec.ram.capacityPerNode,{size}: lower the "
            f"capacity, free memory or narrow spec.agent.nodeSelector: {pod.unscheduled}",
            wanted.name if wanted else "",
        )
    return Problem(
        reasons.UNSCHEDULABLE,
        f"pod {pod.name} finds no node: give nodes what the scheduler misses, or tolerate their taints: {pod.unscheduled}",
        wanted.name if wanted else "",
    )


def _wanted_node(pod: Pod, nodes: Mapping[str, Node]) -> Node | None:
    """The node that a DaemonSet's pod is meant for."""
    return nodes.get(pod.target_node)


def _node_problem(pod: Pod, nodes: Mapping[str, Node]) -> Problem | None:
    node = nodes.get(pod.node)
    if node is None or node.is_ready:
        return None
    return Problem(
        reasons.NODE_NOT_READY,
        f"node {node.name} is not ready: look at its kubelet (kubectl describe node {node.name}); "
        f"pod {pod.name} comes back with it",
        node.name,
    )


def _image_problem(pod: Pod) -> Problem | None:
    for one in pod.containers:
        if one.waiting_reason in IMAGE_REASONS:
            return Problem(
                reasons.IMAGE_PULL_FAILED,
                f"pod {pod.name}: image {one.image} cannot be pulled ({one.waiting_reason}): correct its name, make it "
                f"reachable from the node, or name the registry's Secret in spec.agent.imagePullSecrets: {one.waiting_message}",
                pod.node,
            )
    return None


def _missing_problem(pod: Pod, warnings: Iterable[WarningEvent]) -> Problem | None:
    texts = [one.waiting_message for one in pod.containers if one.waiting_reason == "CreateContainerConfigError"]
    told = [one for one in warnings if one.object_uid == pod.uid and one.reason in ("FailedMount", "Failed")]
    texts += [one.message for one in sorted(told, key=lambda one: one.last_seen, reverse=True)]
    for text in texts:
        match = _MISSING.search(text)
        if match:
            name = f"Secret {match['name']}" if match["name"] and match[1] == "secret" else "what the message names"
            return Problem(
                reasons.SECRET_MISSING,
                f"pod {pod.name} waits for {name}: create it in namespace {pod.namespace} with the keys that are needed, "
                f"or correct the reference: {text}",
                pod.node,
            )
    return None


def _crash_problem(pod: Pod) -> Problem | None:
    for one in pod.containers:
        if one.waiting_reason in CRASH_REASONS:
            return Problem(
                reasons.CONTAINER_CRASHING,
                f"container {one.name} of pod {pod.name} does not stay up ({ending(one)}): read its log: "
                f"kubectl -n {pod.namespace} logs {pod.name} -c {one.name} --previous {one.waiting_message}".rstrip(),
                pod.node,
            )
    return None


def ending(container: Container) -> str:
    """How a container ended last, for people."""
    if not container.finished_at:
        return "it was never started"
    return f"{container.exit_reason or 'ended'}, exit code {container.exit_code}"


def _starting(pod: Pod) -> Problem:
    restarted = [one for one in pod.containers if one.restarts and not one.is_ready]
    if restarted:
        one = restarted[0]
        return Problem(
            reasons.CONTAINER_RESTARTED,
            f"container {one.name} of pod {pod.name} ended ({ending(one)}) and was started again: it will be ready soon; "
            f"if not, read its log",
            pod.node,
        )
    where = f" on node {pod.node}" if pod.node else ""
    return Problem(reasons.PODS_STARTING, f"pod {pod.name}{where} is starting: wait", pod.node)
