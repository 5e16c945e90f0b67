"""A pool's status, from what was observed.

Pure. Invariant: equal observations give an equal status, times of transitions apart: nothing is written when nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpool_operator import names, reasons
from kvpool_operator.names import Manifest
from kvpool_operator.observed import Observed, Pod, Workload
from kvpool_operator.pool import Pool
from kvpool_operator.status import agents, valkey
from kvpool_operator.status.condition import Condition, Problem, fails, holds, merge, unknown
from kvpool_operator.status.headline import headline
from kvpool_operator.status.problems import creation_problem, pod_problem


def build_status(pool: Pool, observed: Observed, *, now: str) -> Manifest:
    """The whole status as it shall be. `now`: RFC 3339, for conditions that change."""
    counted = agents.counts(observed)
    tier = valkey.counts(pool, observed)
    judged = conditions(pool, observed)
    return {
        "observedGeneration": pool.generation,
        "conditions": merge(pool.status.get("conditions") or (), judged, generation=pool.generation, now=now),
        "summary": {
            "message": headline(judged[0].message),
            "agents": f"{counted['ready']}/{counted['desired']}",
            "valkey": valkey.summary(pool, observed),
        },
        "agents": counted,
        "unhealthyNodes": agents.unhealthy_nodes(observed),
        "workloads": workload_counts(observed),
        **({"valkey": tier} if tier is not None else {}),
        **({"routing": {"url": names.router_url(pool)}} if pool.routing.mode == "Proxy" else {}),
    }


def paused_status(pool: Pool, *, now: str) -> Manifest:
    """The former status with a word on why nothing follows the spec."""
    former = pool.status.get("conditions") or []
    message = "annotation kvpool.io/reconcile=paused: nothing is changed until it is removed"
    written = merge(
        former, [unknown(reasons.SPEC_ACCEPTED, reasons.PAUSED, message)], generation=pool.generation, now=now
    )
    others = [one for one in former if one.get("type") != reasons.SPEC_ACCEPTED]
    return {**pool.status, "conditions": [*others, *written]}


def held_up_status(pool: Pool, problem: Problem, *, now: str) -> Manifest:
    """The former status of a pool for which nothing can be done now; what is known of its parts stays."""
    former = pool.status.get("conditions") or []
    conditions = [fails(reasons.READY, problem), fails(reasons.SPEC_ACCEPTED, problem)]
    written = merge(former, conditions, generation=pool.generation, now=now)
    others = [one for one in former if one.get("type") not in (reasons.READY, reasons.SPEC_ACCEPTED)]
    summary = {**(pool.status.get("summary") or {}), "message": headline(problem.message)}
    return {
        **pool.status,
        "observedGeneration": pool.generation,
        "conditions": [*written, *others],
        "summary": summary,
    }


def refused_status(former: Manifest, generation: int, problem: str, *, now: str) -> Manifest:
    """Of a pool whose spec this operator does not understand."""
    wrong = Problem(reasons.SPEC_NOT_UNDERSTOOD, problem)
    conditions = [fails(reasons.READY, wrong), fails(reasons.SPEC_ACCEPTED, wrong)]
    written = merge(former.get("conditions") or (), conditions, generation=generation, now=now)
    return {"observedGeneration": generation, "conditions": written, "summary": {"message": headline(problem)}}


def conditions(pool: Pool, observed: Observed) -> list[Condition]:
    """All five, Ready first."""
    accepted = _accepted(observed)
    available = agents.agents_condition(pool, observed)
    tier = valkey.valkey_condition(pool, observed)
    rollout = _rollout(pool, observed)
    ready = _ready(accepted, available, _router(pool, observed), tier)
    return [ready, accepted, available, tier, rollout]


def _accepted(observed: Observed) -> Condition:
    kind = reasons.SPEC_ACCEPTED
    if observed.waiting_for_former:
        problem = Problem(
            reasons.FORMER_OBJECTS_GOING,
            f"objects of a former pool of this name are still going: {observed.waiting_for_former}: wait",
        )
        return fails(kind, problem)
    if observed.refusals:
        first, more = observed.refusals[0], len(observed.refusals) - 1
        return fails(kind, Problem(first.reason, first.message + (f" (and {more} more)" if more else "")))
    return holds(kind, reasons.ACCEPTED, "every object is as the spec has it")


def _ready(accepted: Condition, available: Condition, router: Problem | None, tier: Condition) -> Condition:
    kind = reasons.READY
    for condition in (accepted, available):
        if not condition.is_true:
            return Condition(kind, "False", condition.reason, condition.message)
    if router is not None:
        return fails(kind, router)
    if not tier.is_true:
        return Condition(kind, "False", tier.reason, tier.message)
    return holds(kind, reasons.ALL_PARTS_READY, available.message)


def _router(pool: Pool, observed: Observed) -> Problem | None:
    """Why no router serves; None when one does or none is wanted."""
    workload = observed.workload("Deployment")
    if pool.routing.mode != "Proxy" or (workload is not None and workload.ready):
        return None
    found = _router_problem(observed, workload)
    if found is None or found.reason == reasons.PODS_STARTING:
        said = found.message if found else "the Deployment is being made: wait"
        return Problem(reasons.ROUTER_UNAVAILABLE, f"no router is ready: {said}")
    return Problem(found.reason, f"no router is ready: {found.message}")


def _router_problem(observed: Observed, workload: Workload | None) -> Problem | None:
    creation = creation_problem(workload, observed.warnings)
    if creation is not None:
        return creation
    nodes = agents.node_map(observed)
    waiting = (pod for pod in observed.pods_of(names.ROUTER) if not pod.is_ready and not pod.is_terminating)
    found = [pod_problem(pod, observed.warnings, nodes) for pod in waiting]
    return min(found, key=lambda problem: problem.reason == reasons.PODS_STARTING, default=None)


def _rollout(pool: Pool, observed: Observed) -> Condition:
    kind = reasons.ROLLOUT_COMPLETE
    if observed.rollout.reason:
        return fails(kind, _agents_rollout(observed))
    for workload in _workloads(pool, observed):
        if workload.is_current and workload.updated >= workload.desired and workload.ready >= workload.desired:
            continue
        problem = _router_problem(observed, workload) if workload.kind == "Deployment" else None
        said = f"{workload.kind} {workload.name}: {workload.updated} of {workload.desired} pods are updated"
        if problem is None or problem.reason == reasons.PODS_STARTING:
            return fails(kind, Problem(reasons.ROLLING_OUT, f"{said}, {workload.ready} are ready: wait"))
        return fails(kind, Problem(problem.reason, f"{said}: {problem.message}"))
    return holds(kind, reasons.UP_TO_DATE, "every pod that there is was made from the newest spec")


def _agents_rollout(observed: Observed) -> Problem:
    """A rollout that waits for an agent that does not just start says so at once."""
    rollout = observed.rollout
    stuck = agents.stuck(agents.agent_problems(observed)) if rollout.reason == reasons.ROLLING_OUT else None
    if stuck is None:
        return Problem(rollout.reason, rollout.message)
    return Problem(stuck.reason, f"{rollout.message}: {stuck.message}")


def _workloads(pool: Pool, observed: Observed) -> Iterator[Workload]:
    """Those whose rollout Kubernetes does itself."""
    wanted = [("Deployment", pool.routing.mode == "Proxy"), ("StatefulSet", pool.managed is not None)]
    for kind, is_wanted in wanted:
        workload = observed.workload(kind)
        if is_wanted and workload is not None:
            yield workload


def workload_counts(observed: Observed) -> dict[str, Any]:
    """status.workloads."""
    skipped = sum(_is_skipped(pod) for pod in observed.candidates)
    return {
        "injected": len(observed.engines),
        "skipped": skipped,
        "webhookMissed": len(observed.candidates) - skipped,
    }


def _is_skipped(pod: Pod) -> bool:
    return names.SKIPPED_ANNOTATION in pod.annotations
