"""Who of a pool may ask the API server for what.

Invariant: agents may review tokens and nothing else; routers may look at pods where engines may opt in and nowhere else.
The roles themselves are made by the chart: the operator only binds them.
"""

from __future__ import annotations

from kvpool_operator import names
from kvpool_operator.names import Manifest
from kvpool_operator.plan import router
from kvpool_operator.pool import Pool
from kvpool_operator.settings import Settings

EVERYWHERE = ("*",)
"""What `allowedNamespaces: {from: All}` resolves to."""
_RBAC = "rbac.authorization.k8s.io"


def build_bindings(pool: Pool, settings: Settings, allowed: tuple[str, ...]) -> list[Manifest]:
    """Every binding of a pool."""
    bindings = [_cluster_binding(pool, names.AGENT, settings.agent_cluster_role, names.agent_name(pool))]
    if not router.is_enabled(pool):
        return bindings
    role, account = settings.router_cluster_role, names.router_name(pool)
    if allowed == EVERYWHERE:
        return [*bindings, _cluster_binding(pool, names.ROUTER, role, account)]
    # its own namespace always: the agents that it follows are there
    namespaces = sorted({pool.namespace, *allowed})
    return [*bindings, *(_binding(pool, namespace, role, account) for namespace in namespaces)]


def _binding(pool: Pool, namespace: str, role: str, account: str) -> Manifest:
    if namespace == pool.namespace:
        metadata = names.metadata(pool, names.router_name(pool), names.ROUTER)
    else:
        metadata = names.far_metadata(pool, names.ROUTER, namespace=namespace)
    return {"apiVersion": f"{_RBAC}/v1", "kind": "RoleBinding", "metadata": metadata, **_who(pool, role, account)}


def _cluster_binding(pool: Pool, component: str, role: str, account: str) -> Manifest:
    metadata = names.far_metadata(pool, component, namespace=None)
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": metadata,
        **_who(pool, role, account),
    }


def _who(pool: Pool, role: str, account: str) -> Manifest:
    return {
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": pool.namespace}],
    }
