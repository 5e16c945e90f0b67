"""What status says of the shared tier.

Pure. Invariant: a managed Valkey is judged by its own cluster first and by the agents' word after that, an external one by
the agents' word alone: the operator has no way to it.
"""

from __future__ import annotations

from kvpool_operator import names, reasons
from kvpool_operator.observed import Observed, ValkeyHealth
from kvpool_operator.pool import Pool
from kvpool_operator.status.agents import node_map, silence
from kvpool_operator.status.condition import Condition, Problem, fails, holds, unknown
from kvpool_operator.status.problems import creation_problem, pod_problem
from kvpool_operator.status.valkey_heard import EXTERNAL, KIND, MANAGED, heard


def valkey_condition(pool: Pool, observed: Observed) -> Condition:
    """ValkeyAvailable."""
    if pool.managed is not None:
        return _managed(observed)
    if pool.external is not None:
        return _external(pool, observed)
    return holds(KIND, reasons.NOT_CONFIGURED, "spec.valkey is not set: blocks stay on their nodes")


def _managed(observed: Observed) -> Condition:
    problem = pods_problem(observed)
    health = observed.valkey
    if health is None:
        return fails(KIND, problem or Problem(reasons.PODS_STARTING, "the shards are being made: wait"))
    if problem is not None:
        return fails(KIND, Problem(problem.reason, f"{_said(health)}: {problem.message}"))
    if health.waiting:
        reason, message = health.waiting[0]
        others = sum(one[0] == reason for one in health.waiting) - 1
        more = f" (and {others} more)" if others else ""
        outlook = "" if reason == reasons.SHARD_REFUSES else ": it heals by itself"
        return fails(KIND, Problem(reason, f"{_said(health)}: {message}{more}{outlook}"))
    if health.ready < health.shards:
        return fails(KIND, Problem(reasons.PODS_STARTING, f"{_said(health)}: wait"))
    asked = [stats for stats in observed.stats.values() if stats.valkey_state]
    return heard(asked, MANAGED) or holds(KIND, reasons.ALL_SHARDS_READY, _said(health))


def _said(health: ValkeyHealth) -> str:
    return f"{health.ready} of {health.shards} shards are ready, {health.slots_covered} of 16384 slots are served"


def pods_problem(observed: Observed) -> Problem | None:
    """Of the shards' pods."""
    creation = creation_problem(observed.workload("StatefulSet"), observed.warnings)
    if creation is not None:
        return creation
    nodes = node_map(observed)
    found = [
        pod_problem(pod, observed.warnings, nodes)
        for pod in observed.pods_of(names.VALKEY)
        if not pod.is_ready and not pod.is_terminating
    ]
    return min(found, key=lambda problem: problem.reason == reasons.PODS_STARTING, default=None)


def _external(pool: Pool, observed: Observed) -> Condition:
    asked = [stats for stats in observed.stats.values() if stats.valkey_state]
    if not asked:
        silent = silence(observed)
        if silent is not None:
            return unknown(KIND, silent.reason, silent.message)
        return unknown(KIND, reasons.AWAITING_AGENTS, "no agent has tried to reach Valkey yet: wait for a ready agent")
    problem = heard(asked, EXTERNAL)
    if problem is not None:
        return problem
    where = ", ".join(pool.external.endpoints[:3]) if pool.external else ""
    return holds(KIND, reasons.CONNECTED, f"{len(asked)} agents are connected to {where}")


def summary(pool: Pool, observed: Observed) -> str:
    """What `kubectl get` shows."""
    if pool.managed is not None:
        return f"{observed.valkey.ready if observed.valkey else 0}/{pool.managed.shards}"
    return "External" if pool.external is not None else "None"


def counts(pool: Pool, observed: Observed) -> dict[str, int] | None:
    """status.valkey; None unless managed."""
    if pool.managed is None:
        return None
    health = observed.valkey
    return {
        "shards": pool.managed.shards,
        "ready": health.ready if health else 0,
        "slotsCovered": health.slots_covered if health else 0,
    }
