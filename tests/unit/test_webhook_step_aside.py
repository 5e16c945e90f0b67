"""The webhook steps aside wherever an injected pod could not start, and says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.webhook import skip_reasons as reasons
from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.inject import stamp_skip
from kvpool_operator.webhook.placement import may_land, may_land_now
from kvpool_operator.webhook.pool_reference import pool_reference
from kvpool_operator.webhook.skip_reasons import Skip
from kvpool_operator.webhook.views import NamespaceFacts, NodeView, Taint
from tests.unit.webhook_pods import POOL, around, engine, engine_pod, injected, pool_with, recorded, skip_reason


def pod_with(**spec: Any) -> Manifest:
    """An engine's pod with more in its spec."""
    pod = engine_pod()
    pod["spec"] |= spec
    return pod


def labelled(**labels: str) -> Manifest:
    """An engine's pod with more labels."""
    pod = engine_pod()
    pod["metadata"]["labels"] |= {key.replace("__", "/"): value for key, value in labels.items()}
    return pod


# --- pool -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("chat", ("here", "chat")), ("there/chat", ("there", "chat")), (" chat ", ("here", "chat"))],
)
def test_a_pool_is_named_with_or_without_its_namespace(text: str, expected: tuple[str, str]) -> None:
    assert pool_reference({"metadata": {"annotations": {"kvpool.io/pool": text}}}, "here") == expected


@pytest.mark.parametrize("text", ["", "a/b/c", "/chat", "there/", "Chat", "a b", "-a", "x" * 64, None])
def test_anything_else_names_no_pool(text: str | None) -> None:
    annotations = {} if text is None else {"kvpool.io/pool": text}
    pods: list[Manifest] = [{"metadata": {"annotations": annotations}}, {"metadata": {}}, {}]
    for pod in pods:
        found = pool_reference(pod, "here")
        assert isinstance(found, Skip)
        assert found.reason == reasons.POOL_NOT_NAMED


def test_the_pool_must_be_there_stay_and_allow_the_namespace() -> None:
    pod = engine_pod()
    assert skip_reason(pod, around(pool=None)) == reasons.POOL_NOT_FOUND
    assert skip_reason(pod, pool_with(is_deleting=True)) == reasons.POOL_BEING_DELETED
    assert skip_reason(pod, pool_with(allowed_namespaces=frozenset({"other"}))) == reasons.NAMESPACE_NOT_ALLOWED
    assert skip_reason(pod, pool_with(allowed_namespaces=frozenset({"default"}))) == ""


# --- namespace --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("privileged", ""),
        ("baseline", reasons.POD_SECURITY),
        ("restricted", reasons.POD_SECURITY),
        ("misspelt", reasons.POD_SECURITY),
    ],
)
def test_levels_of_pod_security_that_refuse_a_hostpath(level: str, expected: str) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level, "pod-security.kubernetes.io/enforce-version": "v1.20"}
    assert skip_reason(engine_pod(), around(facts=NamespaceFacts("default", labels))) == expected


def test_levels_that_only_warn_or_audit_do_not_count() -> None:
    labels = {"pod-security.kubernetes.io/warn": "restricted", "pod-security.kubernetes.io/audit": "restricted"}
    assert skip_reason(engine_pod(), around(facts=NamespaceFacts("default", labels))) == ""


def test_an_unknown_namespace() -> None:
    assert skip_reason(engine_pod(), around(facts=None)) == reasons.NAMESPACE_UNKNOWN


# --- kinds of pods ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"os": {"name": "windows"}}, reasons.WINDOWS_POD),
        ({"os": {"name": "linux"}}, ""),
        ({"nodeSelector": {"kubernetes.io/os": "windows"}}, reasons.WINDOWS_POD),
        ({"runtimeClassName": "gvisor"}, reasons.SANDBOXED_RUNTIME),
        ({"runtimeClassName": "kata-qemu"}, reasons.SANDBOXED_RUNTIME),
        ({"runtimeClassName": "nvidia"}, ""),
        ({"hostUsers": False}, reasons.USER_NAMESPACE),
        ({"hostUsers": True}, ""),
        ({"hostNetwork": True}, ""),
    ],
)
def test_kinds_of_pods_that_could_not_start(spec: Manifest, expected: str) -> None:
    assert skip_reason(pod_with(**spec)) == expected


def test_a_static_pods_mirror_is_left_alone() -> None:
    pod = engine_pod()
    pod["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "x"
    assert skip_reason(pod) == reasons.STATIC_POD


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"component": "transformer", "serving.kserve.io__inferenceservice": "a"}, reasons.NOT_A_PREDICTOR),
        ({"component": "explainer", "serving.kserve.io__inferenceservice": "a"}, reasons.NOT_A_PREDICTOR),
        ({"component": "predictor", "serving.kserve.io__inferenceservice": "a"}, ""),
        ({"component": "transformer"}, ""),
        ({"llm-d.ai__role": "both"}, ""),
        ({"llm-d.ai__role": "decode"}, reasons.DISAGGREGATED_ROLE),
    ],
)
def test_roles_that_are_no_engines_of_their_own(labels: dict[str, str], expected: str) -> None:
    assert skip_reason(labelled(**labels)) == expected


@pytest.mark.parametrize("name", ["llminferenceservice-prefill.pod.json", "llminferenceservice-decode.pod.json"])
def test_disaggregated_pods_of_kserve_are_left_alone(name: str) -> None:
    assert skip_reason(recorded(name)) == reasons.DISAGGREGATED_ROLE


# --- names and paths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kvpool-connector", "kvpool-socket", "kvpool-token"])
def test_a_volume_of_the_users_with_our_name(name: str) -> None:
    assert skip_reason(pod_with(volumes=[{"name": name, "emptyDir": {}}])) == reasons.NAME_TAKEN


def test_a_container_of_the_users_with_our_name() -> None:
    assert skip_reason(pod_with(initContainers=[{"name": "kvpool-inject", "image": "x"}])) == reasons.NAME_TAKEN


@pytest.mark.parametrize(
    ("label", "needed"),
    [("kvpool.io/pool", "chat"), ("kvpool.io/pool-namespace", "default"), ("kvpool.io/role", "engine")],
)
def test_a_label_of_the_users_is_not_changed(label: str, needed: str) -> None:
    pod = engine_pod()
    for value in ("mine", ""):
        pod["metadata"]["labels"][label] = value
        assert skip_reason(pod) == reasons.LABEL_TAKEN
    pod["metadata"]["labels"][label] = needed
    assert skip_reason(pod) == ""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/opt", reasons.MOUNT_PATH_TAKEN),
        ("/opt/kvpool-connector", reasons.MOUNT_PATH_TAKEN),
        ("/opt/kvpool-connector/x/", reasons.MOUNT_PATH_TAKEN),
        ("/run", reasons.MOUNT_PATH_TAKEN),
        ("/var/run", reasons.MOUNT_PATH_TAKEN),
        ("/var/run/kvpool", reasons.MOUNT_PATH_TAKEN),
        ("/run/secrets", reasons.MOUNT_PATH_TAKEN),
        ("/var", reasons.MOUNT_PATH_TAKEN),
        ("/opt//kvpool-connector", reasons.MOUNT_PATH_TAKEN),
        ("/srv/../opt/kvpool-connector", reasons.MOUNT_PATH_TAKEN),
        ("opt/kvpool-connector", reasons.MOUNT_PATH_TAKEN),
        ("//run/kvpool", reasons.MOUNT_PATH_TAKEN),
        ("/var/./run", reasons.MOUNT_PATH_TAKEN),
        ("/opt/kvpool", ""),
        ("/var/run/secrets/kubernetes.io/serviceaccount", ""),
        ("/dev/shm", ""),
        ("/variable", ""),
    ],
)
def test_mounts_that_would_hide_ours_or_keep_them_from_being_made(path: str, expected: str) -> None:
    pod = engine_pod()
    engine(pod)["volumeMounts"] = [{"name": "x", "mountPath": path}]
    assert skip_reason(pod) == expected
    engine(pod)["volumeMounts"] = None
    engine(pod)["volumeDevices"] = [{"name": "x", "devicePath": path}]
    assert skip_reason(pod) == expected


# --- the image --------------------------------------------------------------------------------------------------------


def test_no_ready_agent_runs_the_image() -> None:
    assert skip_reason(engine_pod(), pool_with(ready_agents=0)) == reasons.NO_READY_AGENT


def test_an_engine_is_injected_with_the_image_that_ready_agents_run_while_the_pool_is_not_rolled_yet() -> None:
    former = replace(POOL, image="registry.example.com/kvpool:0.9", nodes_with_image=frozenset({"large"}))
    targets: tuple[dict[str, Any], ...] = ({"ready_agents": 0}, {"image_pull_policy": "Never"})
    for target in targets:
        pool = pool_with(**target, former_images=(former,))
        assert injected(engine_pod(), pool)["spec"]["initContainers"][-1]["image"] == former.image
    rolled = pool_with(former_images=(former,))
    assert injected(engine_pod(), rolled)["spec"]["initContainers"][-1]["image"] == POOL.image
    missing = replace(former, image_pull_policy="Never", nodes_with_image=frozenset())
    assert skip_reason(engine_pod(), pool_with(ready_agents=0, former_images=(missing,))) == reasons.NO_READY_AGENT


def test_a_pull_secret_is_needed_in_another_namespace() -> None:
    elsewhere = pool_with(namespace="pools", image_pull_secrets=("registry",))
    assert skip_reason(engine_pod(), elsewhere) == reasons.PULL_SECRET_MISSING
    assert skip_reason(pod_with(imagePullSecrets=[{"name": "registry"}]), elsewhere) == ""


def test_the_image_is_missing_on_a_node_where_the_pod_may_land() -> None:
    node = NodeView("b", {"kubernetes.io/hostname": "b"}, allocatable=frozenset({"cpu", "memory"}))
    missing = pool_with(nodes_without_image=(node,))
    assert skip_reason(engine_pod(), missing) == reasons.IMAGE_MISSING_ON_NODE
    assert skip_reason(pod_with(nodeSelector={"kubernetes.io/hostname": "a"}), missing) == ""


A, B = (NodeView(name, {"kubernetes.io/hostname": name}) for name in ("a", "b"))


def test_an_image_that_is_never_pulled_is_only_where_a_ready_agent_runs_it() -> None:
    never = pool_with(image_pull_policy="Never", nodes=(A, B), nodes_with_image=frozenset({"a"}))
    assert skip_reason(engine_pod(), never) == reasons.IMAGE_MISSING_ON_NODE
    assert skip_reason(pod_with(nodeName="b"), never) == reasons.IMAGE_MISSING_ON_NODE
    assert skip_reason(pod_with(nodeSelector={"kubernetes.io/hostname": "a"}), never) == ""
    everywhere = pool_with(image_pull_policy="Never", nodes=(A, B), nodes_with_image=frozenset({"a", "b"}))
    assert skip_reason(engine_pod(), everywhere) == ""


@pytest.mark.parametrize("policy", ["IfNotPresent", "Always"])
def test_an_image_that_agents_pulled_can_be_had_elsewhere_unless_one_could_not(policy: str) -> None:
    known: dict[str, Any] = {"image_pull_policy": policy, "nodes": (A, B), "nodes_with_image": frozenset({"a"})}
    assert skip_reason(engine_pod(), pool_with(**known)) == ""
    failing = pool_with(**known, nodes_without_image=(NodeView("c", {"kubernetes.io/hostname": "c"}),))
    assert skip_reason(pod_with(nodeSelector={"kubernetes.io/hostname": "b"}), failing) == reasons.IMAGE_MISSING_ON_NODE
    assert skip_reason(pod_with(nodeSelector={"kubernetes.io/hostname": "a"}), failing) == ""


def test_an_image_that_agents_pulled_is_not_had_on_nodes_of_another_kind() -> None:
    """An image of one architecture cannot be pulled, or run, on another."""
    x86, other_x86, arm = (
        NodeView(name, {"kubernetes.io/os": "linux", "kubernetes.io/arch": arch})
        for name, arch in (("a", "amd64"), ("b", "amd64"), ("c", "arm64"))
    )
    known: dict[str, Any] = {"nodes_with_image": frozenset({"a"})}
    assert skip_reason(engine_pod(), pool_with(nodes=(x86, other_x86), **known)) == ""
    mixed = pool_with(nodes=(x86, other_x86, arm), **known)
    assert skip_reason(engine_pod(), mixed) == reasons.IMAGE_MISSING_ON_NODE
    assert skip_reason(pod_with(nodeSelector={"kubernetes.io/arch": "amd64"}), mixed) == ""
    both = pool_with(nodes=(x86, arm), nodes_with_image=frozenset({"a", "c"}))
    assert skip_reason(engine_pod(), both) == ""


GPU = NodeView(
    "gpu",
    {"zone": "a", "gpu": "h200"},
    (Taint("nvidia.com/gpu", "present", "NoSchedule"), Taint("slow", "", "PreferNoSchedule")),
    frozenset({"cpu", "memory", "nvidia.com/gpu"}),
)
TOLERATED = {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}


def required(*terms: Manifest) -> Manifest:
    """A spec that tolerates the GPU's taint and requires one of these terms."""
    return {
        **TOLERATED,
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
        },
    }


def expression(operator: str, key: str = "gpu", values: tuple[str, ...] = ()) -> Manifest:
    """A term with one expression."""
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, False),
        (TOLERATED, True),
        ({"tolerations": [{"operator": "Exists"}]}, True),
        ({"tolerations": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]}, True),
        ({"tolerations": [{"key": "nvidia.com/gpu", "value": "absent"}]}, False),
        ({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}]}, False),
        ({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Gt", "value": "1"}]}, True),
        ({**TOLERATED, "nodeSelector": {"zone": "a"}}, True),
        ({**TOLERATED, "nodeSelector": {"zone": "b"}}, False),
        ({"nodeName": "gpu"}, True),
        ({**TOLERATED, "nodeName": "other"}, False),
        (required(expression("In", values=("h200", "b200"))), True),
        (required(expression("In", values=("b200",))), False),
        (required(expression("In", values=("b200",)), expression("Exists", "zone")), True),
        (required(expression("NotIn", values=("h200",))), False),
        (required(expression("NotIn", "absent", ("x",))), True),
        (required(expression("DoesNotExist")), False),
        (required(expression("Exists", "absent")), False),
        (required(expression("Gt", values=("1",))), True),
        (required({}), False),
        (required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu"]}]}), True),
        (required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["x"]}]}), False),
    ],
)
def test_where_a_pod_may_land(spec: Manifest, expected: bool) -> None:
    assert may_land(pod_with(**spec), GPU) is expected


def test_a_pod_that_needs_a_device_does_not_land_where_there_is_none() -> None:
    pod = engine_pod(resources={"limits": {"nvidia.com/gpu": "1", "memory": "1Gi"}})
    assert not may_land(pod, NodeView("plain", allocatable=frozenset({"cpu", "memory"})))
    assert may_land(pod, NodeView("gpu", allocatable=frozenset({"cpu", "memory", "nvidia.com/gpu"})))


def toleration(key: str, **more: str) -> Manifest:
    """A spec that tolerates one taint."""
    return {"tolerations": [{"key": key, "operator": "Exists", **more}]}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, False),
        (toleration("node.kubernetes.io/unschedulable"), True),
        (toleration("node.kubernetes.io/unschedulable", effect="NoSchedule"), True),
        (toleration("node.kubernetes.io/unschedulable", effect="NoExecute"), False),
        ({"tolerations": [{"operator": "Exists"}]}, True),
        ({"nodeName": "cordoned"}, True),
        ({"nodeName": "other"}, False),
    ],
)
def test_a_cordoned_node_counts_where_the_pod_tolerates_it(spec: Manifest, expected: bool) -> None:
    taint = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
    for taints in ((), (taint,)):
        node = NodeView("cordoned", unschedulable=True, taints=taints)
        assert may_land(pod_with(**spec), node) is may_land_now(pod_with(**spec), node) is expected


def test_a_node_that_is_not_ready_will_be_again() -> None:
    node = NodeView("b", taints=(Taint("node.kubernetes.io/not-ready", "", "NoSchedule"),))
    assert may_land(engine_pod(), node)
    assert not may_land_now(engine_pod(), node)
    never = pool_with(image_pull_policy="Never", nodes=(A, node), nodes_with_image=frozenset({"a"}))
    assert skip_reason(engine_pod(), never) == reasons.IMAGE_MISSING_ON_NODE


# --- what stands on the pod -------------------------------------------------------------------------------------------


@given(message=st.text())
def test_what_is_written_on_the_pod_is_one_short_line(message: str) -> None:
    text = Skip("PolicyRefuses", message).text
    assert len(text) <= 1000
    assert text.isprintable()
    assert len(message) > 900 or len(text) == len(f"PolicyRefuses: {message}")


def test_a_long_refusal_is_cut_where_it_is_written() -> None:
    skip = Skip("PolicyRefuses", "no\n\x1b[31m" + "x" * 100_000)
    written = stamp_skip(engine_pod(), skip)["metadata"]["annotations"]["kvpool.io/skip-reason"]
    assert written.startswith("PolicyRefuses: no  [31mxxx")
    assert written.endswith("x…")
    assert len(written) == 1000
