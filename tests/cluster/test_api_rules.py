"""What the API server itself refuses, with the field and, where a rule of ours refuses, the remedy."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, CommandError
from tests.cluster.installation import pool_manifest
from tests.cluster.workloads import Manifest

EXTERNAL = {"endpoints": ["valkey.example:6379"]}
MANAGED = {"shards": 1, "memoryPerShard": "256Mi"}


def apply(cluster: Cluster, manifest: Manifest, *arguments: str) -> str:
    return cluster.kubectl("apply", "--server-side", "--filename=-", *arguments, stdin=json.dumps(manifest))


def changed(manifest: Manifest, path: str, value: object) -> Manifest:
    """A copy with the value at a dotted path; None removes it."""
    copied = copy.deepcopy(manifest)
    *parents, last = path.split(".")
    at: Any = copied["spec"]
    for key in parents:
        at = at.setdefault(key, {})
    if value is None:
        del at[last]
    else:
        at[last] = value
    return copied


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("valkey", {"managed": MANAGED, "external": EXTERNAL}, ("spec.valkey", "exactly one", "managed", "external")),
        ("valkey", {}, ("spec.valkey", "exactly one", "managed", "external")),
        ("ram.capacityPerNode", "63Mi", ("spec.ram.capacityPerNode", "64Mi", "16Ti")),
        ("ram.capacityPerNode", "17Ti", ("spec.ram.capacityPerNode", "64Mi", "16Ti")),
        ("ram.capacityPerNode", "64GB", ("spec.ram.capacityPerNode",)),
        ("ram.capacityPerNode", None, ("spec.ram.capacityPerNode",)),
        ("agent.nodeSelector", {}, ("spec.agent.nodeSelector",)),
        ("agent.nodeSelector", {"gpu": "NVIDIA A100"}, ("spec.agent.nodeSelector", "gpu", "--show-labels")),
        ("agent.nodeSelector", {"the gpu": "a"}, ("spec.agent.nodeSelector", "[prefix/]name", "--show-labels")),
        ("valkey", {"managed": {**MANAGED, "shards": 65}}, ("spec.valkey.managed.shards",)),
        ("valkey", {"external": {"endpoints": []}}, ("spec.valkey.external.endpoints",)),
        ("routing", {"mode": "Magic"}, ("spec.routing.mode",)),
    ],
)
def test_a_wrong_pool_is_refused_with_its_field(
    operator: Cluster, make_namespace: Callable[..., str], path: str, value: object, expected: tuple[str, ...]
) -> None:
    manifest = changed(pool_manifest("chat", make_namespace("rules")), path, value)
    with pytest.raises(CommandError) as refusal:
        apply(operator, manifest, "--dry-run=server")
    for part in expected:
        assert part in str(refusal.value)


def test_an_unknown_field_is_refused_under_strict_validation(
    operator: Cluster, make_namespace: Callable[..., str]
) -> None:
    manifest = changed(pool_manifest("chat", make_namespace("rules")), "ram.capacity", "1Gi")
    with pytest.raises(CommandError, match=r"\.spec\.ram\.capacity: field not declared"):
        apply(operator, manifest, "--dry-run=server", "--validate=strict")
    with pytest.raises(CommandError, match=r'unknown field "spec\.ram\.capacity"'):  # as most people apply
        operator.kubectl("apply", "--dry-run=server", "--validate=strict", "--filename=-", stdin=json.dumps(manifest))


@pytest.mark.parametrize("name", ["Chat", "9chat", "c" * 41])
def test_a_name_that_cannot_begin_the_names_of_its_parts_is_refused(
    operator: Cluster, make_namespace: Callable[..., str], name: str
) -> None:
    with pytest.raises(CommandError, match="name"):
        apply(operator, pool_manifest(name, make_namespace("rules")), "--dry-run=server")


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("valkey.external.keyPrefix", "other:", ("spec.valkey.external", "keyPrefix", "new pool")),
        ("valkey", {"managed": MANAGED}, ("spec.valkey", "new pool")),
        ("valkey", None, ()),
    ],
)
def test_what_is_immutable_cannot_be_changed(
    operator: Cluster, make_namespace: Callable[..., str], path: str, value: object, expected: tuple[str, ...]
) -> None:
    namespace = make_namespace("rules")
    nowhere = {"kvpool.io/test": "no-node"}
    external = {"external": {**EXTERNAL, "keyPrefix": "mine:", "deletionPolicy": "Retain"}}
    manifest = pool_manifest("chat", namespace, node_selector=nowhere, valkey=external)
    apply(operator, manifest)
    if not expected:
        apply(operator, changed(manifest, path, value))  # a pool may give its shared tier up
        return
    with pytest.raises(CommandError) as refusal:
        apply(operator, changed(manifest, path, value))
    for part in expected:
        assert part in str(refusal.value)
