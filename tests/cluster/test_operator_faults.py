"""An operator that is killed or stopped amid its work leaves nothing wrong: the audit log shows that it was amid."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.cluster.audit import AuditLog, Write
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.installation import SYSTEM, ensure_namespace, pool_manifest, read_pool, wait_pool_ready
from tests.cluster.operators import leader, operator_pid, operators
from tests.cluster.owned import essence, owned
from tests.cluster.waiting import wait_for

pytestmark = pytest.mark.local
NAMESPACE = "test-operator-faults"
ALLOWED = "test-operator-faults-guests"
KILLS = 50
TRIES = 80
BURST = 20
"""Pools at once: some hundred writes."""
REMADE = ("configmap", "serviceaccount", "poddisruptionbudget", "rolebinding")
"""Kinds of which the pool misses nothing for a while: one is deleted before each kill."""
START_SECONDS = 60.0


@pytest.fixture(scope="module")
def pool(operator: Cluster) -> Iterator[Cluster]:
    """A pool with every kind of object."""
    for name in (NAMESPACE, ALLOWED):
        operator.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=90s")
        ensure_namespace(operator, name)
    wanted: dict[str, Any] = {
        "valkey": {"managed": {"shards": 1, "memoryPerShard": "128Mi"}},
        "allowedNamespaces": {
            "from": "Selector",
            "selector": {"matchLabels": {"kubernetes.io/metadata.name": ALLOWED}},
        },
    }
    operator.apply(pool_manifest("chat", NAMESPACE, capacity="64Mi", **wanted))
    wait_pool_ready(operator, "chat", NAMESPACE)
    yield operator
    operator.kubectl("delete", "namespace", NAMESPACE, ALLOWED, "--wait=false")


def next_writes(log: AuditLog, wanted: set[tuple[str, str, str]], number: int) -> list[Write]:
    """Writes to wanted objects, once `number` of these were written; all by one operator since it started."""
    found: list[Write] = []
    end = time.monotonic() + START_SECONDS
    while len({write.target for write in found}) < number:
        if time.monotonic() > end:
            raise ClusterError(f"not within {START_SECONDS:g} s: {number} of {sorted(wanted)} written, but {found}")
        found += [write for write in log.writes() if write.target in wanted and not write.subresource]
        time.sleep(0.001)
    return found


def target(manifest: Any) -> tuple[str, str, str]:
    """As the audit log names an object."""
    metadata = manifest["metadata"]
    return metadata.get("namespace", ""), f"{manifest['kind'].lower()}s", metadata["name"]


def new_pid(cluster: Cluster, pod: str, former: int) -> int:
    """Of a container that was killed, once it runs again."""

    def found() -> int:
        pid = operator_pid(cluster, pod)
        return pid if pid != former else 0

    return wait_for(found, seconds=START_SECONDS, what=f"{pod} runs again")


def test_the_operator_killed_amid_50_reconciles_converges_to_the_same_objects(pool: Cluster) -> None:
    """A new process applies every object once, so one that applied some and not all was amid its reconcile."""
    chosen = random.Random(11)
    before = owned(pool, "chat", NAMESPACE)
    wanted = {target(each) for each in before.values() if each["metadata"].get("namespace") != SYSTEM}
    light = sorted(key for key in before if key.partition("/")[0].lower() in REMADE)
    pids = {pod: operator_pid(pool, pod) for pod in operators(pool)}
    leading = leader(pool)
    amid: list[int] = []
    with closing(AuditLog(pool.audit_log)) as log:
        os.kill(pids[leading], signal.SIGKILL)
        for _ in range(TRIES):
            lost = before[chosen.choice(light)]
            namespace = f"--namespace={lost['metadata']['namespace']}"
            pool.kubectl("delete", lost["kind"], lost["metadata"]["name"], namespace, "--ignore-not-found")
            pids[leading] = new_pid(pool, leading, pids[leading])
            log.writes()  # of the former process
            written = next_writes(log, wanted, chosen.randrange(1, len(wanted)))
            leading = written[-1].by
            os.kill(pids[leading], signal.SIGKILL)
            done = {write.target for write in written + [w for w in log.writes() if w.by == leading]} & wanted
            if done != wanted:
                amid.append(len(done))
            if len(amid) == KILLS:
                break
    assert len(amid) == KILLS, f"only {len(amid)} of {TRIES} kills came before the reconcile's end: {amid}"
    wait_for(
        lambda: essence(owned(pool, "chat", NAMESPACE)) == essence(before),
        seconds=120,
        what="the same objects as before",
        explain=lambda: set(essence(owned(pool, "chat", NAMESPACE)).items()) ^ set(essence(before).items()),
    )
    wait_pool_ready(pool, "chat", NAMESPACE)


def test_a_leader_stopped_amid_a_burst_writes_nothing_after_its_successors_first_write(pool: Cluster) -> None:
    nowhere = {"kvpool.io/test": "no-node"}
    names = [f"burst-{number}" for number in range(BURST)]
    burst = [
        pool_manifest(name, NAMESPACE, capacity="64Mi", node_selector=nowhere, routing={"mode": "Disabled"})
        for name in names
    ]
    stopped = leader(pool)
    pid = operator_pid(pool, stopped)
    began = time.time()
    with closing(AuditLog(pool.audit_log)) as log:
        pool.apply(*burst)
        writes = _until(log, [], lambda w: w.by == stopped and w.name.startswith("burst-"), number=BURST)
        os.kill(pid, signal.SIGSTOP)
        try:
            unfinished = [name for name in names if not read_pool(pool, name, NAMESPACE).get("status")]
            assert unfinished, "the leader was stopped after its work, not amid"
            others = set(operators(pool)) - {stopped}
            writes = _until(log, writes, lambda w: w.by in others and w.resource != "leases", number=1)
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(
            lambda: _has_said(pool, stopped, "not leading", began), seconds=30, what="it knows that it leads no more"
        )
        wait_for(
            lambda: all(read_pool(pool, name, NAMESPACE).get("status") for name in names),
            seconds=60,
            what="the successor finished the work",
        )
        writes += log.writes()
    mark = next(write.received for write in writes if write.by in others and write.resource != "leases")
    late = [write for write in writes if write.by == stopped and write.received > mark]
    assert not late, late
    pool.kubectl("delete", "kvpool", *names, f"--namespace={NAMESPACE}", "--wait=false")


def _until(log: AuditLog, writes: list[Write], counts: Any, *, number: int) -> list[Write]:
    """All writes from `writes` on, once so many count."""
    end = time.monotonic() + START_SECONDS
    while sum(map(counts, writes)) < number:
        if time.monotonic() > end:
            raise ClusterError(f"not within {START_SECONDS:g} s: {number} writes; there are {writes}")
        writes = [*writes, *log.writes()]
        time.sleep(0.001)
    return writes


def _has_said(cluster: Cluster, pod: str, words: str, since: float) -> bool:
    seconds = int(time.time() - since) + 1
    return f'"{words}"' in cluster.kubectl("logs", pod, f"--namespace={SYSTEM}", f"--since={seconds}s")
