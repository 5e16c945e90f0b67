"""What status says of the agents.

Pure. Invariant: an agent counts as ready only while its pod is and its node is; every node whose agent does not serve is
explained by one Problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpool_operator import names, reasons
from kvpool_operator.observed import AgentStats, Node, Observed, Pod
from kvpool_operator.plan.pods import ADMIN_PORT
from kvpool_operator.pool import Pool
from kvpool_operator.status.condition import Condition, Problem, fails, holds
from kvpool_operator.status.problems import creation_problem, pod_problem

UNHEALTHY_NODES_MAX = 10
NODE_MESSAGE_MAX = 1000
URGENCY = (
    reasons.QUOTA_EXCEEDED,
    reasons.POD_REFUSED,
    reasons.CAPACITY_EXCEEDS_NODE,
    reasons.UNSCHEDULABLE,
    reasons.IMAGE_PULL_FAILED,
    reasons.SECRET_MISSING,
    reasons.CONTAINER_CRASHING,
    reasons.NODE_NOT_READY,
    reasons.ARENA_PENDING,
    reasons.CONTAINER_RESTARTED,
    reasons.AGENT_NOT_READY,
    reasons.PODS_STARTING,
)
"""What a person must do something about first."""
GOES_ON = frozenset(
    {reasons.PODS_STARTING, reasons.ARENA_PENDING, reasons.AGENT_NOT_READY, reasons.CONTAINER_RESTARTED}
)
"""What is part of a start, and no reason to call a rollout stuck."""


def node_map(observed: Observed) -> Mapping[str, Node]:
    """Nodes by name."""
    return {node.name: node for node in observed.nodes}


def is_serving(pod: Pod, nodes: Mapping[str, Node]) -> bool:
    """Whether an agent's pod serves engines."""
    node = nodes.get(pod.node)
    return pod.is_ready and not pod.is_terminating and (node is None or node.is_ready)


def agent_problems(observed: Observed) -> list[Problem]:
    """Of every agent that does not serve, and of those that were never made; most urgent first."""
    nodes = node_map(observed)
    found = [
        _agent_problem(pod, observed, nodes)
        for pod in observed.pods_of(names.AGENT)
        if not is_serving(pod, nodes) and not pod.is_terminating
    ]
    creation = creation_problem(observed.workload("DaemonSet"), observed.warnings)
    if creation is not None:
        found.append(creation)
    return sorted(found, key=lambda problem: (_urgency(problem.reason), problem.node))


def _urgency(reason: str) -> int:
    return URGENCY.index(reason) if reason in URGENCY else len(URGENCY)


def _agent_problem(pod: Pod, observed: Observed, nodes: Mapping[str, Node]) -> Problem:
    problem = pod_problem(pod, observed.warnings, nodes, memory_bytes=observed.agent_memory_bytes)
    stats = observed.stats.get(pod.uid)
    if problem.reason not in (reasons.PODS_STARTING, reasons.CONTAINER_RESTARTED) or stats is None:
        return problem
    return _said_by_agent(pod, stats) or problem


def _said_by_agent(pod: Pod, stats: AgentStats) -> Problem | None:
    if stats.error:
        return None  # it does not listen yet: what Kubernetes says of its pod says more
    if stats.arena_reason == reasons.ARENA_PENDING:
        return Problem(
            reasons.ARENA_PENDING,
            f"the agent on node {pod.node} waits until engines unmap the former arena ({stats.waiting_for}): "
            f"it goes on by itself; restart the engines named if it lasts",
            pod.node,
        )
    return Problem(
        reasons.AGENT_NOT_READY,
        f"the agent on node {pod.node} is not ready: it waits for {stats.waiting_for or 'its start'}; see the log of {pod.name}",
        pod.node,
    )


def agents_condition(pool: Pool, observed: Observed) -> Condition:
    """AgentsAvailable."""
    kind = reasons.AGENTS_AVAILABLE
    workload = observed.workload("DaemonSet")
    if workload is None or not workload.is_current:
        return fails(kind, Problem(reasons.PODS_STARTING, "the agents' DaemonSet is being made: wait"))
    counted = counts(observed)
    ready, desired = counted["ready"], counted["desired"]
    if not desired:
        return fails(kind, _no_node(pool, observed))
    problems = agent_problems(observed)
    said = f"{ready} of {desired} agents are ready"
    if ready >= desired and not problems:
        silent = silence(observed)
        return holds(kind, reasons.ALL_AGENTS_READY, f"{said}, but {silent.message}" if silent else said)
    if observed.rollout.reason == reasons.ROLLING_OUT and ready >= max(1, desired - 1) and not stuck(problems):
        return holds(kind, reasons.ROLLING_OUT, f"{said}, one is being replaced")
    if not problems:
        return fails(kind, Problem(reasons.PODS_STARTING, f"{said}: the others are being made: wait"))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return fails(kind, Problem(problems[0].reason, f"{said}: {problems[0].message}{more}"))


def stuck(problems: Sequence[Problem]) -> Problem | None:
    """The most urgent one that does not go by as agents start."""
    return next((problem for problem in problems if problem.reason not in GOES_ON), None)


def silence(observed: Observed) -> Problem | None:
    """Why no agent can be asked although some are ready: kubelets reach them, so it is the operator's way there."""
    nodes = node_map(observed)
    serving = [pod for pod in observed.pods_of(names.AGENT) if is_serving(pod, nodes)]
    asked = [observed.stats[pod.uid] for pod in serving if pod.uid in observed.stats]
    if not asked or not all(stats.error for stats in asked):
        return None
    return Problem(
        reasons.AGENTS_SILENT,
        f"the operator cannot ask agents how they are: let its pods connect to port {ADMIN_PORT} of the agents' pods "
        f"(NetworkPolicies of the pool's namespace): {asked[0].error}",
    )


def _no_node(pool: Pool, observed: Observed) -> Problem:
    wanted = ", ".join(f"{key}={value}" for key, value in pool.agent.node_selector)
    if not observed.nodes:
        return Problem(
            reasons.NO_NODE_MATCHES,
            f"no node has the labels of spec.agent.nodeSelector ({wanted}): label nodes (kubectl label node NAME "
            f"{wanted.replace(', ', ' ')}) or correct the selector",
        )
    return Problem(
        reasons.NO_NODE_MATCHES,
        f"{len(observed.nodes)} nodes have the labels {wanted}, but their taints or spec.agent.affinity keep agents away: "
        f"add spec.agent.tolerations or correct the affinity",
    )


def counts(observed: Observed) -> dict[str, Any]:
    """status.agents. A DaemonSet does not count nodes that are away, where its pods stay nevertheless."""
    nodes = node_map(observed)
    workload = observed.workload("DaemonSet")
    agents = [pod for pod in observed.pods_of(names.AGENT) if not pod.is_terminating]
    serving = {pod.node for pod in agents if is_serving(pod, nodes)}
    wanted_hash = workload.config_hash if workload else ""
    return {
        "desired": max(workload.desired if workload else 0, len({pod.node for pod in agents} & nodes.keys())),
        "ready": len(serving),
        "updated": sum(pod.config_hash == wanted_hash for pod in agents),
        "image": observed.agent_image,
        "enginesWithoutAgent": sum(
            pod.phase == "Running" and not pod.is_terminating and pod.node not in serving for pod in observed.engines
        ),
    }


def unhealthy_nodes(observed: Observed) -> list[dict[str, str]]:
    """status.unhealthyNodes."""
    chosen: dict[str, Problem] = {}
    for problem in agent_problems(observed):
        if problem.node:
            chosen.setdefault(problem.node, problem)
    return [
        {"name": node, "reason": problem.reason, "message": problem.message[:NODE_MESSAGE_MAX]}
        for node, problem in list(chosen.items())[:UNHEALTHY_NODES_MAX]
    ]
