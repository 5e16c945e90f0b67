"""`kvpool-pre-delete`: what the chart runs before it is uninstalled.

Stops the operator, waits until its pods are gone, then takes the operator's finalizer off every pool, so that pools and
namespaces can be deleted when nobody is there any more to do it. Invariant: it ends within TOTAL_SECONDS, whatever is
missing, and removes no finalizer but ours; exit status 0 means that no pool has it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool_core.errors import KVPoolError
from kvpool_operator.fence import OpenFence
from kvpool_operator.kube import Kube, connect
from kvpool_operator.kube_errors import NotFoundError
from kvpool_operator.logs import set_up_logging
from kvpool_operator.names import FINALIZER, KIND, Manifest

TOTAL_SECONDS = 120.0
"""Well below the Job's activeDeadlineSeconds, which also counts pulling the image, and that below Helm's 5 minutes."""
STOP_SECONDS = 45.0
"""How long the operator's pods may take to go: their grace period and some. One on a lost node never goes: on without it."""
PAUSE_SECONDS = 1.0
"""Between two looks."""

log = logging.getLogger("kvpool.pre_delete")


@dataclass(frozen=True, slots=True)
class HeldPool:
    """A pool and its finalizers, as they were read."""

    namespace: str
    name: str
    finalizers: tuple[str, ...]
    resource_version: str


class Cluster(Protocol):
    """The API server's part in this. What is missing is no error; any KVPoolError is tried again."""

    def scale_to_zero(self, namespace: str, deployment: str) -> bool:
        """False: there is no such Deployment."""

    def count_pods(self, namespace: str, selector: str) -> int:
        """Pods that exist, those that are ending included."""

    def list_pools(self) -> Sequence[HeldPool]:
        """Pools of all namespaces; none when the CRD is missing."""

    def set_finalizers(self, pool: HeldPool, finalizers: Sequence[str]) -> None:
        """Replace the finalizers, if the pool is still as it was read; nothing happens when it is gone."""


@dataclass(frozen=True, slots=True)
class Operator:
    """What is to be stopped."""

    namespace: str
    deployment: str
    selector: str


@dataclass(slots=True)
class Clock:
    """Time as an argument."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def without_ours(finalizers: Sequence[str]) -> tuple[str, ...]:
    """The finalizers that are somebody else's."""
    return tuple(finalizer for finalizer in finalizers if finalizer != FINALIZER)


def release_pools(cluster: Cluster, operator: Operator, clock: Clock) -> str:
    """Stop the operator, then release every pool. What is not done after TOTAL_SECONDS; "" = all is done."""
    started = clock.now()
    if running := _repeat(lambda: _stop(cluster, operator), clock, until=started + STOP_SECONDS):
        log.warning("going on although %s", running)
    return _repeat(lambda: _release(cluster), clock, until=started + TOTAL_SECONDS)


def _repeat(step: Callable[[], str], clock: Clock, *, until: float) -> str:
    """`step` again and again until it has nothing more to say, or the time is over: then what it said last."""
    while True:
        try:
            problem = step()
        except KVPoolError as error:
            problem = str(error)
        if not problem or clock.now() >= until:
            return problem
        clock.sleep(PAUSE_SECONDS)


def _stop(cluster: Cluster, operator: Operator) -> str:
    if not cluster.scale_to_zero(operator.namespace, operator.deployment):
        log.info("there is no Deployment %s/%s", operator.namespace, operator.deployment)
    pods = cluster.count_pods(operator.namespace, operator.selector)
    return f"{pods} pods of the operator are still there" if pods else ""


def _release(cluster: Cluster) -> str:
    """One look at all pools; done when a look finds none that is held."""
    problems = [_release_one(cluster, pool) for pool in cluster.list_pools() if FINALIZER in pool.finalizers]
    return "; ".join(problems)


def _release_one(cluster: Cluster, pool: HeldPool) -> str:
    try:
        cluster.set_finalizers(pool, without_ours(pool.finalizers))
    except KVPoolError as error:
        return f"KVCachePool {pool.namespace}/{pool.name} has still the finalizer {FINALIZER}: {error}"
    log.info("released KVCachePool %s/%s", pool.namespace, pool.name)
    return f"KVCachePool {pool.namespace}/{pool.name} was released and not looked at again"


class ApiServer:
    """`Cluster` by requests."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    def scale_to_zero(self, namespace: str, deployment: str) -> bool:
        """As in `Cluster`."""
        try:
            self._kube.merge("Deployment", namespace, deployment, {"spec": {"replicas": 0}})
        except NotFoundError:
            return False
        return True

    def count_pods(self, namespace: str, selector: str) -> int:
        """As in `Cluster`."""
        return sum(1 for _ in self._kube.list_all("Pod", namespace=namespace, labels=selector))

    def list_pools(self) -> Sequence[HeldPool]:
        """As in `Cluster`."""
        try:
            return [_held_pool(pool["metadata"]) for pool in self._kube.list_all(KIND)]
        except NotFoundError:
            return []

    def set_finalizers(self, pool: HeldPool, finalizers: Sequence[str]) -> None:
        """As in `Cluster`."""
        changed = {"resourceVersion": pool.resource_version, "finalizers": list(finalizers)}
        try:
            self._kube.merge(KIND, pool.namespace, pool.name, {"metadata": changed})
        except NotFoundError:
            log.info("KVCachePool %s/%s is gone", pool.namespace, pool.name)


def _held_pool(metadata: Manifest) -> HeldPool:
    return HeldPool(
        namespace=metadata["namespace"],
        name=metadata["name"],
        finalizers=tuple(metadata.get("finalizers") or ()),
        resource_version=metadata["resourceVersion"],
    )


def main(command_line: Sequence[str] | None = None) -> int:
    """Run the hook; the exit status. `command_line` None: the process's own."""
    parser = argparse.ArgumentParser(prog="kvpool-pre-delete", description="Lets pools go before the chart is removed.")
    parser.add_argument("--namespace", required=True, help="the operator's namespace")
    parser.add_argument("--deployment", required=True, help="the operator's Deployment")
    parser.add_argument("--selector", required=True, help="label selector of the operator's pods")
    arguments = parser.parse_args(command_line)
    set_up_logging("INFO", {"component": "pre-delete"})
    operator = Operator(arguments.namespace, arguments.deployment, arguments.selector)
    try:
        left = release_pools(ApiServer(Kube(connect(), OpenFence())), operator, Clock())
    except KVPoolError as error:
        left = str(error)
    if left:
        log.error("not done: %s", left)
        return 1
    log.info("no pool has the finalizer %s", FINALIZER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
