"""Where the API server keeps each kind that the operator deals with.

Invariant: no discovery: a kind that is not listed here is a fault of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from kvpool_operator import names


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind's place."""

    api_version: str
    plural: str
    is_namespaced: bool = True

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """URL path of a collection (name "") or an object."""
        root = "/api/v1" if self.api_version == "v1" else f"/apis/{self.api_version}"
        parts = [root]
        if self.is_namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part]
        return "/".join(parts)


RESOURCES = {
    names.KIND: Resource(names.API_VERSION, names.PLURAL),
    "Pod": Resource("v1", "pods"),
    "Node": Resource("v1", "nodes", is_namespaced=False),
    "Namespace": Resource("v1", "namespaces", is_namespaced=False),
    "Event": Resource("v1", "events"),
    "ConfigMap": Resource("v1", "configmaps"),
    "Secret": Resource("v1", "secrets"),
    "Service": Resource("v1", "services"),
    "ServiceAccount": Resource("v1", "serviceaccounts"),
    "ResourceQuota": Resource("v1", "resourcequotas"),
    "LimitRange": Resource("v1", "limitranges"),
    "DaemonSet": Resource("apps/v1", "daemonsets"),
    "Deployment": Resource("apps/v1", "deployments"),
    "StatefulSet": Resource("apps/v1", "statefulsets"),
    "ReplicaSet": Resource("apps/v1", "replicasets"),
    "Job": Resource("batch/v1", "jobs"),
    "PodDisruptionBudget": Resource("policy/v1", "poddisruptionbudgets"),
    "RoleBinding": Resource("rbac.authorization.k8s.io/v1", "rolebindings"),
    "ClusterRoleBinding": Resource("rbac.authorization.k8s.io/v1", "clusterrolebindings", is_namespaced=False),
    "Lease": Resource("coordination.k8s.io/v1", "leases"),
    "MutatingWebhookConfiguration": Resource(
        "admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", is_namespaced=False
    ),
}

OWNED_KINDS = (
    "ServiceAccount",
    "RoleBinding",
    "ClusterRoleBinding",
    "ConfigMap",
    "Service",
    "StatefulSet",
    "DaemonSet",
    "Deployment",
    "PodDisruptionBudget",
)
"""Kinds that a living pool owns and that can be listed; Secrets are known by name, the purge Job by the deletion."""
