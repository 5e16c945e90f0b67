"""Every object that a pool owns, as it should be.

Pure. Invariant: equal inputs give equal objects in an order in which each finds what it refers to. A field by which somebody else
could stop a part (`paused`, `partition`, a nodeSelector) is planned although its value is the default: what server-side apply
is not told stays as others set it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool_operator.names import Manifest
from kvpool_operator.observed import Namespace
from kvpool_operator.plan import agent, rbac, router, secrets, valkey
from kvpool_operator.plan.secrets import Generated
from kvpool_operator.pool import Pool
from kvpool_operator.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What planning needs beside the pool itself.

    allowed: names of the namespaces that may opt in, or ("*",). valkey_replicas: how many Valkey pods there must be now.
    """

    allowed: tuple[str, ...]
    generated: Generated
    valkey_replicas: int


def allowed_namespaces(pool: Pool, namespaces: tuple[Namespace, ...]) -> tuple[str, ...]:
    """Names of those that may opt in; ("*",) for all."""
    allowed = pool.allowed_namespaces
    if allowed.kind == "All":
        return rbac.EVERYWHERE
    if allowed.kind == "Same":
        return (pool.namespace,)
    chosen = (one.name for one in namespaces if not one.is_terminating and allowed.selector.matches(one.labels))
    return tuple(sorted(chosen))


def plan(pool: Pool, inputs: PlanInputs, settings: Settings) -> list[Manifest]:
    """Every object of a living pool."""
    objects = [
        secrets.build_token(pool, inputs.generated),
        secrets.build_valkey(pool, inputs.generated),
        agent.build_service_account(pool),
        router.build_service_account(pool),
        valkey.build_service_account(pool),
        *rbac.build_bindings(pool, settings, inputs.allowed),
        agent.build_namespaces(pool, inputs.allowed),
        agent.build_config_map(pool),
        router.build_config_map(pool),
        valkey.build_config_map(pool),
        router.build_service(pool),
        valkey.build_service(pool),
        valkey.build_stateful_set(pool, settings, replicas=inputs.valkey_replicas),
        agent.build_daemon_set(pool, settings),
        router.build_deployment(pool, settings),
        router.build_disruption_budget(pool),
        valkey.build_disruption_budget(pool),
    ]
    return [one for one in objects if one is not None]
