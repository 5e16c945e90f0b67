"""What the webhook is told of the cluster: projections that the operator's caches fill, no API call per pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Taint:
    """A node's taint."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class NodeView:
    """As much of a node as it takes to say whether a pod may land on it."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    allocatable: frozenset[str] = frozenset()
    """Names of the resources of which the node has any."""
    unschedulable: bool = False
    memory_bytes: int = 0
    """Allocatable; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """A pool as a pod that opts in sees it."""

    namespace: str
    name: str
    image: str
    """Image of the init container: the one that the pool's agents run, or are to run."""
    socket_folder: str
    """Folder on the host that agent and engines share."""
    capacity_bytes: int
    ready_agents: int
    """Ready agent pods that run `image`."""
    is_deleting: bool = False
    allowed_namespaces: frozenset[str] | None = None
    """Namespaces that may opt in; None: all."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    huge_pages: bool = False
    nodes_without_image: tuple[NodeView, ...] = ()
    """Nodes whose agent pod cannot get `image`."""
    nodes_with_image: frozenset[str] = frozenset()
    """Names of the nodes on which an agent runs or ran with `image`."""
    nodes: tuple[NodeView, ...] = ()
    """Every node of the cluster."""
    former_images: tuple[PoolView, ...] = ()
    """The same pool with other images that Ready agents run, where its agents are not rolled yet."""


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """What is known of the namespace of a pod."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    bounds_memory: bool = False
    """Whether a ResourceQuota or LimitRange bounds memory there: then an engine's memory is left as it is."""
