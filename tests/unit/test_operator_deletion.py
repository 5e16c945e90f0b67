"""How a pool ends: its keys, its objects, its finalizer."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from kvpool_operator import names
from kvpool_operator.kube_errors import ForbiddenError, UnavailableError
from kvpool_operator.leadership import Term
from kvpool_operator.metrics import OperatorMetrics
from kvpool_operator.reconcile import Reconciler
from kvpool_operator.work_queue import WorkQueue
from kvpool_operator.workers import Office, Workers
from tests.unit.fake_api_server import FakeApiServer, Refusal
from tests.unit.operator_pools import EXTERNAL, MANAGED, SETTINGS, UID, manifest
from tests.unit.played_cluster import (
    KEY,
    NOW,
    Movable,
    deleted,
    operator,
    settled,
)


def test_only_keys_that_must_be_purged_hold_a_pool_back(api: FakeApiServer) -> None:
    settled(api)
    pool = api.find("KVCachePool", "chat")
    assert pool is not None
    assert "finalizers" not in pool["metadata"]

    external = {**manifest(valkey=EXTERNAL)}
    api.put(external)
    operating = operator(api)
    operating.reconcile(KEY)
    pool = api.find("KVCachePool", "chat")
    assert pool is not None
    assert pool["metadata"]["finalizers"] == [names.FINALIZER]

    kept = {"external": {"endpoints": ["v:6379"], "deletionPolicy": "Retain"}}
    api.put({**pool, "spec": {**pool["spec"], "valkey": kept}})
    operating.reconcile(KEY)
    pool = api.find("KVCachePool", "chat")
    assert pool is not None
    assert pool["metadata"]["finalizers"] == []


def ending(api: FakeApiServer) -> Reconciler:
    """A pool with keys outside that was deleted just now."""
    operating = settled(api, valkey=EXTERNAL)
    pool = api.find("KVCachePool", "chat")
    assert pool is not None
    api.put({**pool, "metadata": {**pool["metadata"], "deletionTimestamp": "2026-01-01T12:00:00Z"}})
    return operating


def test_keys_go_after_the_agents_and_the_pool_after_the_keys(api: FakeApiServer) -> None:
    operating = ending(api)

    assert operating.reconcile(KEY) is not None
    assert (api.names("DaemonSet"), api.names("Pod"), api.names("Job")) == ([], [], [])
    operating.reconcile(KEY)
    assert api.names("Job") == ["chat-purge"]
    operating.reconcile(KEY)
    assert api.names("KVCachePool") == ["chat"]

    job = api.find("Job", "chat-purge")
    assert job is not None
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert operating.reconcile(KEY) is None

    assert api.names("KVCachePool") == []
    assert api.names("Job") == []


def test_purge_whose_pod_is_refused_says_why(api: FakeApiServer) -> None:
    operating = ending(api)
    for _ in range(2):
        operating.reconcile(KEY)
    job = api.find("Job", "chat-purge")
    assert job is not None
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "DeadlineExceeded"}]}
    about = {"kind": "Job", "name": "chat-purge", "uid": job["metadata"]["uid"]}
    meta = {"namespace": "inference", "name": "refused"}
    said = {"reason": "FailedCreate", "message": "exceeded quota: small", "type": "Warning"}
    api.put({"kind": "Event", "metadata": meta, "involvedObject": about, **said})

    operating.reconcile(KEY)

    told = [one["message"] for key, one in api.objects.items() if key[0] == "Event" and one["reason"] == "KeysLeft"]
    assert "exceeded quota: small" in told[0]


def test_failing_purge_is_told_and_ends_all_the_same(api: FakeApiServer) -> None:
    operating = ending(api)
    for _ in range(2):
        operating.reconcile(KEY)
    job = api.find("Job", "chat-purge")
    assert job is not None
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "DeadlineExceeded"}]}

    operating.reconcile(KEY)

    assert api.names("KVCachePool") == []
    told = [one["message"] for key, one in api.objects.items() if key[0] == "Event" and one["reason"] == "KeysLeft"]
    assert len(told) == 1
    assert "kvpool:inference/chat:" in told[0]


def test_purge_whose_job_waits_for_an_admission_webhook_goes_on_with_it_and_else_says_so(api: FakeApiServer) -> None:
    operating = ending(api)

    def refuse(_method: str, kind: str, _name: str) -> None:
        if kind == "Job":
            raise Refusal(500, "Internal error occurred: failed calling webhook x: connection refused")

    api.on_write = refuse
    for _ in range(3):
        operating.reconcile(KEY)
    assert api.names("KVCachePool") == ["chat"], "the webhook may come back"
    cast(Movable, operating._clock).now += timedelta(seconds=101)
    operating.reconcile(KEY)

    assert api.names("KVCachePool") == []
    told = [one["message"] for key, one in api.objects.items() if key[0] == "Event" and one["reason"] == "KeysLeft"]
    assert "failed calling webhook x" in told[0]


@pytest.mark.parametrize(
    "hindrance", ["job refused", "too late", "agents cannot be deleted", "pods cannot be read", "namespace going"]
)
def test_pool_always_goes(api: FakeApiServer, hindrance: str) -> None:
    operating = ending(api)
    if hindrance == "job refused":

        def refuse(method: str, kind: str, _name: str) -> None:
            if kind == "Job" and method == "POST":
                raise Refusal(403, "exceeded quota")

        api.on_write = refuse
    elif hindrance == "agents cannot be deleted":

        def keep(method: str, kind: str, _name: str) -> None:
            if kind == "DaemonSet" and method == "DELETE":
                raise Refusal(403, "a policy forbids it")

        api.on_write = keep
    elif hindrance == "pods cannot be read":
        api.refused_reads["Pod"] = 403
    elif hindrance == "namespace going":
        api.put({"kind": "Namespace", "metadata": {"name": "inference"}, "status": {"phase": "Terminating"}})

    for _ in range(3):
        with contextlib.suppress(ForbiddenError):
            operating.reconcile(KEY)
    is_late = hindrance in ("too late", "agents cannot be deleted", "pods cannot be read")
    assert api.names("KVCachePool") == (["chat"] if is_late else [])
    cast(Movable, operating._clock).now += timedelta(seconds=101)
    operating.reconcile(KEY)

    assert api.names("KVCachePool") == []
    assert api.names("Job") == []


def test_keys_of_a_pool_that_goes_with_its_namespace_are_told_of_in_the_log(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    """There, no Event can be made any more."""
    operating = ending(api)
    api.put({"kind": "Namespace", "metadata": {"name": "inference"}, "status": {"phase": "Terminating"}})

    def refuse(method: str, _kind: str, _name: str) -> None:
        if method == "POST":
            raise Refusal(403, "because it is being terminated")

    api.on_write = refuse
    operating.reconcile(KEY)

    assert api.names("KVCachePool") == []
    (said,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "kvpool:inference/chat:" in str(vars(said)["data"])


def test_operator_that_was_away_while_a_pool_was_deleted_has_all_the_time_for_its_keys(api: FakeApiServer) -> None:
    ending(api)
    operating = operator(api, now=NOW + timedelta(hours=1))

    for _ in range(3):
        operating.reconcile(KEY)

    assert (api.names("DaemonSet"), api.names("Pod"), api.names("Job")) == ([], [], ["chat-purge"])
    assert api.names("KVCachePool") == ["chat"]
    assert [one for key, one in api.objects.items() if key[0] == "Event" and one["reason"] == "KeysLeft"] == []


def test_paused_pool_goes_when_it_is_deleted(api: FakeApiServer) -> None:
    operating = settled(api, valkey=EXTERNAL)
    deleted(api, metadata={"annotations": {"kvpool.io/reconcile": "paused"}})

    operating.reconcile(KEY)
    assert api.names("DaemonSet") == []
    cast(Movable, operating._clock).now += timedelta(seconds=101)
    operating.reconcile(KEY)

    assert api.names("KVCachePool") == []


def test_pool_that_is_not_understood_goes_when_it_is_deleted_and_its_keys_are_told_of(api: FakeApiServer) -> None:
    operating = settled(api, valkey=EXTERNAL)
    deleted(api, valkey={"external": {"hosts": ["x"]}}, metadata={"finalizers": [names.FINALIZER, "theirs"]})

    operating.reconcile(KEY)

    pool = api.find("KVCachePool", "chat")
    assert pool is not None
    assert pool["metadata"]["finalizers"] == ["theirs"]
    told = [one["message"] for key, one in api.objects.items() if key[0] == "Event" and one["reason"] == "KeysLeft"]
    assert len(told) == 1
    assert "kvpool:inference/chat:" in told[0]


@pytest.mark.parametrize(
    ("metadata", "is_looked_at"),
    [
        ({}, False),
        ({"finalizers": [names.FINALIZER]}, False),
        ({"deletionTimestamp": "2026-01-01T11:00:00Z", "finalizers": ["theirs"]}, False),
        ({"deletionTimestamp": "2026-01-01T11:00:00Z", "finalizers": [names.FINALIZER]}, True),
    ],
)
def test_resync_looks_at_unwatched_pools_that_wait_for_the_finalizer(
    api: FakeApiServer, metadata: dict[str, Any], is_looked_at: bool
) -> None:
    api.put(manifest(metadata=metadata))
    api.put({"kind": "Namespace", "metadata": {"name": "watched"}})
    api.put(manifest(metadata={"namespace": "watched", "name": "last", "uid": "other"}))
    queue: WorkQueue[tuple[str, str]] = WorkQueue()
    workers = Workers(
        settings=replace(SETTINGS, watched_namespaces=("watched",)),
        queue=queue,
        metrics=OperatorMetrics(CollectorRegistry()),
    )
    workers.begin(Office(Term(100.0, lambda: 0.0), api.kube(), operator(api)))
    thread = threading.Thread(target=workers.resync)
    thread.start()
    taken = {queue.take(10)}
    if is_looked_at:
        taken.add(queue.take(10))
    workers.stop()
    thread.join(10)

    assert taken == {("watched", "last"), *([KEY] if is_looked_at else [])}
    assert len(queue) == 0


def test_dead_pools_bindings_and_master_secrets_are_collected(api: FakeApiServer) -> None:
    operating = settled(api)
    api.remove("KVCachePool", "chat")

    operating.reconcile(KEY)

    assert api.names("ClusterRoleBinding") == []
    assert f"kvpool-{UID}" not in api.names("Secret")


def test_what_a_pool_left_is_collected_although_the_first_try_failed(api: FakeApiServer) -> None:
    operating = settled(api)
    assert api.names("ClusterRoleBinding")
    api.remove("KVCachePool", "chat")
    api.refused_reads["RoleBinding"] = 503

    with pytest.raises(UnavailableError):
        operating.reconcile(KEY)
    api.refused_reads.clear()
    operating.reconcile(KEY)

    assert api.names("ClusterRoleBinding") == []


@pytest.mark.parametrize("refused", ["list", "delete"])
def test_what_may_not_be_collected_is_said_once_and_keeps_nothing_else(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    operating = settled(api)
    api.remove("KVCachePool", "chat")
    if refused == "list":
        api.refused_reads["ClusterRoleBinding"] = 403
    else:

        def keep(method: str, kind: str, _name: str) -> None:
            if (method, kind) == ("DELETE", "ClusterRoleBinding"):
                raise Refusal(403, "a policy keeps it")

        api.on_write = keep

    assert operating.reconcile(KEY) is None
    for _ in range(3):
        operating.collect()

    assert f"kvpool-{UID}" not in api.names("Secret")
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1
    api.on_write = lambda _method, _kind, _name: None
    api.refused_reads.clear()
    operating.collect()
    assert api.names("ClusterRoleBinding") == []


def test_living_pool_of_a_namespace_that_is_not_watched_is_left_alone(api: FakeApiServer) -> None:
    """One made anew under the name of a pool that waited for its finalizer."""
    api.put(manifest())
    operating = operator(api, settings=replace(SETTINGS, watched_namespaces=("elsewhere",)))

    assert operating.reconcile(KEY) is None

    assert api.names("DaemonSet") == []


@pytest.mark.parametrize(
    ("after", "is_told"),
    [
        (None, True),
        ({"endpoints": ["other:6379"], "authSecretRef": {"name": "login"}}, True),
        ({"endpoints": ["valkey:6379", "valkey-2:6379"], "authSecretRef": {"name": "login"}}, False),
        ({"endpoints": ["valkey:6379"], "deletionPolicy": "Retain"}, False),
    ],
)
def test_keys_in_a_valkey_that_a_living_pool_names_no_more_are_told_of(
    api: FakeApiServer, after: dict[str, Any] | None, *, is_told: bool
) -> None:
    operating = settled(api, valkey=EXTERNAL)
    pool = api.find("KVCachePool", "chat")
    assert pool is not None
    spec = {key: value for key, value in pool["spec"].items() if key != "valkey"}
    api.put({**pool, "spec": {**spec, **({"valkey": {"external": after}} if after else {})}})

    for _ in range(2):
        operating.reconcile(KEY)

    told = [one["message"] for key, one in api.objects.items() if key[0] == "Event" and one["reason"] == "KeysLeft"]
    assert len(told) == is_told
    if told:
        assert "valkey:6379" in told[0]
        assert "--pattern 'kvpool:inference/chat:*'" in told[0]


def test_pool_that_had_no_keys_outside_or_was_to_keep_them_tells_of_none(api: FakeApiServer) -> None:
    operating = settled(api, valkey={"external": {"endpoints": ["valkey:6379"], "deletionPolicy": "Retain"}})
    api.put(manifest(valkey=MANAGED))
    operating.reconcile(KEY)
    api.put(manifest())
    operating.reconcile(KEY)

    assert [one for key, one in api.objects.items() if key[0] == "Event" and one["reason"] == "KeysLeft"] == []
