"""What the webhook is told of pools and namespaces: read from time to time, asked without waiting.

Invariant: an answer is a consistent picture of one moment, at most REFRESH_SECONDS older than it was when that was read.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvpool_operator import names, projections
from kvpool_operator.kube import Kube, Raw
from kvpool_operator.kube_errors import KubeError, NotFoundError
from kvpool_operator.observed import Namespace, Node, Pod
from kvpool_operator.ownership import is_of_workload
from kvpool_operator.plan import agent, allowed_namespaces
from kvpool_operator.plan.rbac import EVERYWHERE
from kvpool_operator.pool import Pool, PoolError, parse_pool
from kvpool_operator.settings import Settings
from kvpool_operator.status.problems import IMAGE_REASONS
from kvpool_operator.webhook.views import NamespaceFacts, NodeView, PoolView, Taint

REFRESH_SECONDS = 30.0
DEBOUNCE_SECONDS = 0.5
"""A burst of events leads to one reading."""
NO_IMAGE = IMAGE_REASONS | {"CreateContainerError"}
OUR_CONTAINERS = frozenset({"agent", "holder"})
"""Others may have been put into the pod, of other images."""

log = logging.getLogger("kvpool.operator.directory")
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Picture:
    """All of one moment."""

    pools: Mapping[Key, PoolView] = field(default_factory=dict)
    namespaces: Mapping[str, NamespaceFacts] = field(default_factory=dict)


class Directory:
    """Kept fresh by a thread; asked by others."""

    def __init__(self, kube: Kube, settings: Settings) -> None:
        self._kube = kube
        self._settings = settings
        self._picture = Picture()
        self._poked = threading.Event()
        self._stop = threading.Event()
        self.is_known = threading.Event()
        """Set once there is a first picture."""

    def find_pool(self, namespace: str, name: str) -> PoolView | None:
        """A pool; None when there is none."""
        return self._picture.pools.get((namespace, name))

    def find_namespace(self, name: str) -> NamespaceFacts | None:
        """A namespace; None when it is not known."""
        return self._picture.namespaces.get(name)

    def poke(self) -> None:
        """Something changed."""
        self._poked.set()

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()
        self._poked.set()

    def run(self) -> None:
        """Read whenever poked, and every now and then."""
        while not self._stop.is_set():
            self._poked.clear()
            try:
                self.refresh()
            except KubeError as error:
                log.warning("cannot read pools and namespaces", extra={"data": {"reason": str(error)}})
            self._stop.wait(DEBOUNCE_SECONDS)
            self._poked.wait(REFRESH_SECONDS)

    def refresh(self) -> None:
        """Read anew."""
        namespaces = [projections.namespace(raw) for raw in self._kube.list_all("Namespace")]
        bounded = self._bounded_namespaces()
        agents: dict[str, list[Pod]] = defaultdict(list)
        labels = f"{names.COMPONENT_LABEL}={names.AGENT},{names.MANAGED_BY_LABEL}={names.FIELD_MANAGER}"
        for raw in self._kube.list_all("Pod", labels=labels):
            pod = projections.pod(raw)
            agents[pod.labels.get(names.POOL_UID_LABEL, "")].append(pod)
        nodes = tuple(_node_view(projections.node(raw)) for raw in self._kube.list_all("Node"))
        pools = [pool for raw in self._list_pools() if (pool := _parsed(raw)) is not None]
        self._picture = Picture(
            pools={pool.key: self._view(pool, tuple(namespaces), agents[pool.uid], nodes) for pool in pools},
            namespaces={
                one.name: NamespaceFacts(one.name, one.labels, bounds_memory=one.name in bounded) for one in namespaces
            },
        )
        self.is_known.set()

    def _list_pools(self) -> list[Raw]:
        try:
            return list(self._kube.list_all(names.KIND))
        except NotFoundError:
            return []  # the CRD is missing, so there is none; the resync says so

    def _view(
        self, pool: Pool, namespaces: tuple[Namespace, ...], agents: list[Pod], nodes: tuple[NodeView, ...]
    ) -> PoolView:
        agents = [pod for pod in agents if is_of_workload(pod, pool)]
        lacking = {pod.node for pod in agents if _lacks(pod)}
        allowed = allowed_namespaces(pool, namespaces)
        target = agent.image(pool, self._settings)
        view = PoolView(
            namespace=pool.namespace,
            name=pool.name,
            image=target,
            socket_folder=names.host_folder(pool),
            capacity_bytes=pool.capacity_bytes,
            ready_agents=0,
            is_deleting=bool(pool.deletion_timestamp),
            allowed_namespaces=None if allowed == EVERYWHERE else frozenset(allowed),
            image_pull_policy=pool.agent.image_pull_policy,
            image_pull_secrets=pool.agent.image_pull_secrets,
            nodes_without_image=tuple(node for node in nodes if node.name in lacking),
            nodes=nodes,
        )
        former = tuple(_with_image(view, image, agents) for image in _former_images(target, agents))
        return replace(_with_image(view, target, agents), former_images=former)

    def _bounded_namespaces(self) -> frozenset[str]:
        quotas = {raw["metadata"]["namespace"] for raw in self._kube.list_all("ResourceQuota") if _bounds_quota(raw)}
        ranges = {raw["metadata"]["namespace"] for raw in self._kube.list_all("LimitRange") if _bounds_range(raw)}
        return frozenset(quotas | ranges)


def _parsed(raw: Raw) -> Pool | None:
    try:
        return parse_pool(raw)
    except PoolError:
        return None  # its status says so


def _with_image(view: PoolView, image: str, agents: list[Pod]) -> PoolView:
    """With what the agents show of the image."""
    running = [pod for pod in agents if _runs(pod, image)]
    return replace(
        view,
        image=image,
        ready_agents=sum(_is_serving(pod) for pod in running),
        nodes_with_image=frozenset(pod.node for pod in running if _has_run(pod)),
    )


def _former_images(target: str, agents: list[Pod]) -> list[str]:
    """Other images that Ready agents run, the most frequent first: while a pool waits for its turn to roll, or is paused.

    Only of the target's repository: an image runs in engines' pods of other namespaces, and whoever may make pods in the pool's
    can make one that looks like an agent.
    """
    found = Counter(image for pod in agents if _is_serving(pod) for image in sorted(pod.images))
    return [image for image, _ in found.most_common() if image != target and _repository(image) == _repository(target)]


def _repository(image: str) -> str:
    folder, slash, last = image.partition("@")[0].rpartition("/")
    return f"{folder}{slash}{last.partition(':')[0]}"


def _is_serving(pod: Pod) -> bool:
    return pod.is_ready and not pod.is_terminating


def _runs(pod: Pod, image: str) -> bool:
    """Container statuses name images as the runtime resolved them, so the pod's spec is what counts."""
    return image in pod.images


def _has_run(pod: Pod) -> bool:
    """Whether the node had the image, be the agent ready now or not."""
    return any(one.has_run and one.name in OUR_CONTAINERS for one in pod.containers) and not _lacks(pod)


def _lacks(pod: Pod) -> bool:
    return any(one.waiting_reason in NO_IMAGE for one in pod.containers)


def _node_view(node: Node) -> NodeView:
    return NodeView(
        name=node.name,
        labels=node.labels,
        taints=tuple(Taint(one.key, one.value, one.effect) for one in node.taints),
        allocatable=node.allocatable,
        unschedulable=node.is_unschedulable,
        memory_bytes=node.memory_bytes,
    )


def _bounds_quota(raw: Raw) -> bool:
    hard = (raw.get("spec") or {}).get("hard") or {}
    return any(name in hard for name in ("memory", "requests.memory", "limits.memory"))


def _bounds_range(raw: Raw) -> bool:
    limits = (raw.get("spec") or {}).get("limits") or ()
    return any("memory" in (one.get(kind) or {}) for one in limits for kind in ("max", "maxLimitRequestRatio"))
