"""What one look at a pool does with the shards of its managed Valkey."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from kvpool_operator import reasons
from kvpool_operator.fence import Fence
from kvpool_operator.observed import Pod, ValkeyHealth
from kvpool_operator.reconcile import Reconciler
from tests.unit.fake_api_server import FakeApiServer, Refusal
from tests.unit.operator_pools import MANAGED, manifest
from tests.unit.played_cluster import (
    KEY,
    NOW,
    Healthy,
    condition,
    made_by,
    operator,
    settled,
)


def with_shards(api: FakeApiServer, heal: Healthy) -> tuple[Reconciler, dict[str, Any]]:
    """The operator of a pool with a managed Valkey, and its StatefulSet, of which no pod is there yet."""
    api.put(manifest(valkey=MANAGED))
    operating = operator(api, heal=heal)
    operating.reconcile(KEY)
    stateful_set = api.find("StatefulSet", "chat-valkey")
    assert stateful_set is not None
    return operating, stateful_set


def test_valkey_is_not_scaled_down_before_its_pods_are_empty(api: FakeApiServer) -> None:
    heal = Healthy()
    operating, stateful_set = with_shards(api, heal)
    put_valkey_pod(api, stateful_set, "chat-valkey-0", made_by(stateful_set))
    api.put(manifest(valkey={"managed": {"shards": 1, "memoryPerShard": "1Gi"}}))

    heal.replicas = 3
    operating.reconcile(KEY)
    assert replicas(api) == 3
    heal.replicas = 1
    operating.reconcile(KEY)
    assert replicas(api) == 1


def test_shards_that_refuse_the_present_password_are_replaced(api: FakeApiServer) -> None:
    heal = Healthy()
    heal.are_refusing = True
    operating, stateful_set = with_shards(api, heal)
    put_valkey_pod(api, stateful_set, "chat-valkey-0", made_by(stateful_set), age_seconds=60)
    put_valkey_pod(api, stateful_set, "chat-valkey-1", made_by(stateful_set), age_seconds=5)

    operating.reconcile(KEY)

    assert api.find("Pod", "chat-valkey-0") is None
    assert api.find("Pod", "chat-valkey-1") is not None, "it may be starting with the present Secret"
    told = [one for key, one in api.objects.items() if key[0] == "Event"]
    assert any(one["reason"] == reasons.VALKEY_HEALED and "chat-valkey-0" in str(one) for one in told)


def test_shards_are_kept_while_their_secret_cannot_be_written(api: FakeApiServer) -> None:
    heal = Healthy()
    heal.are_refusing = True
    operating, stateful_set = with_shards(api, heal)
    put_valkey_pod(api, stateful_set, "chat-valkey-0", made_by(stateful_set), age_seconds=60)

    def refuse(method: str, kind: str, name: str) -> None:
        if (kind, name) == ("Secret", "chat-valkey"):
            raise Refusal(403, "a policy forbids it")

    api.on_write = refuse
    api.remove("Secret", "chat-valkey")
    operating.reconcile(KEY)

    assert api.find("Pod", "chat-valkey-0") is not None, "the next one would start without the present users, too"
    assert condition(api, reasons.SPEC_ACCEPTED)["reason"] == reasons.APPLY_REFUSED


def test_password_goes_to_no_pod_that_only_has_the_labels_of_a_shard(api: FakeApiServer) -> None:
    asked: list[str] = []

    class Recording(Healthy):
        def __call__(self, pods: Sequence[Pod], *, shards: int, password: str, fence: Fence) -> ValkeyHealth:
            asked.extend(pod.name for pod in pods)
            return super().__call__(pods, shards=shards, password=password, fence=fence)

    operating, stateful_set = with_shards(api, Recording())
    (real,) = made_by(stateful_set)
    put_valkey_pod(api, stateful_set, "chat-valkey-0", [real])
    put_valkey_pod(api, stateful_set, "no-owner", [])
    put_valkey_pod(api, stateful_set, "other-set", [{**real, "name": "other"}])
    put_valkey_pod(api, stateful_set, "guessed-uid", [{**real, "uid": "guessed"}])
    put_valkey_pod(api, stateful_set, "no-controller", [{**real, "controller": False}])

    operating.reconcile(KEY)

    assert asked == ["chat-valkey-0"]


def test_new_operator_keeps_valkey_pods_of_which_it_knows_nothing(api: FakeApiServer) -> None:
    settled(api, valkey=MANAGED)
    api.put(manifest(valkey={"managed": {"shards": 1, "memoryPerShard": "1Gi"}}))

    operator(api).reconcile(KEY)

    assert replicas(api) == 3


def put_valkey_pod(
    api: FakeApiServer, stateful_set: dict[str, Any], name: str, owners: list[dict[str, Any]], *, age_seconds: float = 0
) -> None:
    """A pod with the labels of a shard."""
    labels = {**stateful_set["spec"]["template"]["metadata"]["labels"]}
    meta = {"namespace": "inference", "name": name, "labels": labels, "ownerReferences": owners}
    created = (NOW - timedelta(seconds=age_seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
    api.put({"kind": "Pod", "metadata": {**meta, "creationTimestamp": created}})


def replicas(api: FakeApiServer) -> int:
    """Wanted Valkey pods."""
    stateful_set = api.find("StatefulSet", "chat-valkey")
    assert stateful_set is not None
    return int(stateful_set["spec"]["replicas"])
