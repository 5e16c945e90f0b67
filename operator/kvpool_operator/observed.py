"""What is there: small frozen projections of the API server's objects.

Invariant: nothing here holds a whole object, so that thousands of pods stay cheap. Parsing is `projections`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool_operator import names


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """A namespace."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    is_terminating: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A node's taint."""

    key: str
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that the pool's nodeSelector matches."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    is_ready: bool = True
    is_unschedulable: bool = False
    memory_bytes: int = 0
    """Allocatable."""
    taints: tuple[Taint, ...] = ()
    allocatable: frozenset[str] = frozenset()
    """Names of resources of which there are some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container's state. `finished_at`: of its last end, RFC 3339, "" when it never ended."""

    name: str
    image: str = ""
    is_ready: bool = False
    has_run: bool = False
    """So its image was on the node."""
    waiting_reason: str = ""
    waiting_message: str = ""
    restarts: int = 0
    exit_code: int = 0
    exit_reason: str = ""
    exit_message: str = ""
    finished_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The controller that a pod says it was made by."""

    kind: str = ""
    name: str = ""
    uid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod. `unscheduled`: the scheduler's message while it has no node."""

    namespace: str
    name: str
    uid: str
    node: str = ""
    phase: str = "Pending"
    ip: str = ""
    is_ready: bool = False
    is_terminating: bool = False
    unscheduled: str = ""
    target_node: str = ""
    """The node that a DaemonSet's pod is meant for."""
    created_at: str = ""
    owner: Owner = Owner()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Only those of kvpool.io."""
    containers: tuple[Container, ...] = ()
    """Init containers first."""
    images: frozenset[str] = frozenset()
    """As its spec names them."""

    @property
    def component(self) -> str:
        """agent | router | valkey | purge, "" for others."""
        return self.labels.get(names.COMPONENT_LABEL, "")

    @property
    def config_hash(self) -> str:
        """Of the template that it was made from."""
        return self.annotations.get(names.CONFIG_HASH, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A DaemonSet, Deployment or StatefulSet of the pool."""

    kind: str
    name: str
    uid: str
    desired: int = 0
    existing: int = 0
    ready: int = 0
    updated: int = 0
    is_current: bool = True
    """Whether its controller has seen the newest generation."""
    config_hash: str = ""
    """Of its present template."""
    failure: str = ""
    """Why its controller cannot make pods, as far as it says so in its status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningEvent:
    """A Warning Event about a pod or a workload. `last_seen`: RFC 3339."""

    object_uid: str
    reason: str
    message: str
    object_kind: str = ""
    object_name: str = ""
    last_seen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStats:
    """What an agent says of itself; `error` when it could not be asked."""

    error: str = ""
    is_ready: bool = False
    waiting_for: str = ""
    arena_reason: str = ""
    """ArenaPending, or ""."""
    valkey_state: str = ""
    """connecting | connected | degraded | unreachable | unauthenticated; "" without a shared tier."""
    valkey_detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyHealth:
    """The managed Valkey's cluster after a step of healing. `waiting`: (reason, message), empty when settled.

    refusing: uids of pods that refuse the operator's login.
    """

    shards: int
    ready: int
    slots_covered: int
    replicas: int
    refusing: frozenset[str] = frozenset()
    waiting: tuple[tuple[str, str], ...] = ()
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An object that could not be applied. `reason` is a condition's."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Where the replacement of outdated agents stands. `reason` "" = nothing to do."""

    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that status is made from."""

    nodes: tuple[Node, ...] = ()
    pods: tuple[Pod, ...] = ()
    """The pool's own."""
    engines: tuple[Pod, ...] = ()
    """Pods with the connector."""
    candidates: tuple[Pod, ...] = ()
    """Pods labelled for injection that name this pool and have no connector."""
    workloads: tuple[Workload, ...] = ()
    warnings: tuple[WarningEvent, ...] = ()
    stats: Mapping[str, AgentStats] = field(default_factory=dict)
    """By pod uid."""
    agent_image: str = ""
    agent_memory_bytes: int = 0
    """Memory request of an agent pod."""
    valkey: ValkeyHealth | None = None
    rollout: Rollout = Rollout()
    refusals: tuple[Refusal, ...] = ()
    waiting_for_former: str = ""
    """Objects of a former pool of the same name that are still going, for people."""

    def pods_of(self, component: str) -> tuple[Pod, ...]:
        """The pool's own pods of one part."""
        return tuple(pod for pod in self.pods if pod.component == component)

    def workload(self, kind: str) -> Workload | None:
        """The pool's DaemonSet, Deployment or StatefulSet."""
        return next((one for one in self.workloads if one.kind == kind), None)
