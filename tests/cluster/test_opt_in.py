"""Whatever keeps a pod from the cache, it starts and serves, and the pod or the pool says why it has none."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, CommandError
from tests.cluster.installation import (
    SYSTEM,
    condition,
    ensure_namespace,
    helm_install,
    helm_uninstall,
    pool_manifest,
    read_pool,
    wait_pool_ready,
)
from tests.cluster.stub_engine import PORT, stub_files, stub_pod
from tests.cluster.waiting import wait_for
from tests.harness.pod_transport import PodTransport

SMALL = "64Mi"
READY_SECONDS = 60.0
NAMESPACE = "test-opt-in"
TRANSFER_CONFIG = '--kv-transfer-config={"kv_connector":"OffloadingConnector","kv_role":"kv_both"}'


@pytest.fixture(scope="module")
def pool(operator: Cluster) -> Iterator[Cluster]:
    """A Ready pool that any namespace may use."""
    operator.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=90s")
    ensure_namespace(operator, NAMESPACE)
    operator.apply(
        stub_files(NAMESPACE, "0.31.0"),
        pool_manifest("chat", NAMESPACE, capacity=SMALL, allowedNamespaces={"from": "All"}),
    )
    wait_pool_ready(operator, "chat", NAMESPACE)
    yield operator
    operator.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def run(cluster: Cluster, client: PodTransport, pod: dict[str, Any]) -> Any:
    """Create the pod, see it serve; the pod as it is."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]

    def is_made() -> bool:
        """Of a namespace that is younger than a moment the operator does not know yet: "create the pod again"."""
        cluster.kubectl("delete", "pod", name, f"--namespace={namespace}", "--ignore-not-found")
        cluster.apply(pod)
        return "NamespaceUnknown" not in skip_reason(cluster.get("pod", name, f"--namespace={namespace}"))

    wait_for(is_made, seconds=READY_SECONDS, what=f"{name} in a namespace that the operator knows")
    cluster.kubectl(
        "wait", f"pod/{name}", f"--namespace={namespace}", "--for=condition=Ready", f"--timeout={READY_SECONDS:g}s"
    )
    found = cluster.get("pod", name, f"--namespace={namespace}")
    reply = client.request("GET", f"http://{found['status']['podIP']}:{PORT}/v1/models")
    assert reply.status == 200
    return found


def skip_reason(pod: Any) -> str:
    return str(pod["metadata"]["annotations"].get("kvpool.io/skip-reason", ""))


def wait_counted(cluster: Cluster, kind: str) -> None:
    """Status counts every labelled pod that names the pool as what it is, and there is one of this kind.

    Within a minute: pods that are not the pool's own are looked for by the resync.
    """

    def kind_of(annotations: dict[str, str]) -> str:
        if "kvpool.io/injected" in annotations:
            return "injected"
        return "skipped" if "kvpool.io/skip-reason" in annotations else "webhookMissed"

    def are_counted() -> bool:
        pods = cluster.get("pods", "--all-namespaces", "--selector=kvpool.io/inject=true")["items"]
        ours = [
            pod["metadata"]["annotations"]
            for pod in pods
            if (pod["metadata"]["annotations"]["kvpool.io/pool"], pod["metadata"]["namespace"]) == ("chat", NAMESPACE)
            or pod["metadata"]["annotations"]["kvpool.io/pool"] == f"{NAMESPACE}/chat"
        ]
        kinds = [kind_of(annotations) for annotations in ours]
        counted = read_pool(cluster, "chat", NAMESPACE)["status"]["workloads"]
        return kind in kinds and counted == {one: kinds.count(one) for one in counted}

    explain = lambda: read_pool(cluster, "chat", NAMESPACE)["status"]["workloads"]  # noqa: E731
    wait_for(are_counted, seconds=90, what=f"status counts pods as they are, {kind} among them", explain=explain)


def assert_untouched(pod: Any, written: dict[str, Any]) -> None:
    """Nothing of ours is in what is run."""
    assert "initContainers" not in pod["spec"]
    assert [v["name"] for v in pod["spec"]["volumes"]] == ["stub"]
    assert pod["spec"]["containers"][0]["args"] == written["spec"]["containers"][0]["args"]


def test_another_vllm_version_serves_and_its_log_says_why_it_has_no_cache(pool: Cluster, client: PodTransport) -> None:
    pod = run(pool, client, stub_pod(pool, "old-version", NAMESPACE))
    assert pod["metadata"]["annotations"]["kvpool.io/injected"] == f"{NAMESPACE}/chat"
    log = pool.kubectl("logs", "old-version", f"--namespace={NAMESPACE}")
    assert "0.31.0" in log
    assert "not supported" in log


def test_an_engine_with_a_transfer_config_of_its_own_keeps_it(pool: Cluster, client: PodTransport) -> None:
    written = stub_pod(pool, "own-config", NAMESPACE, arguments=[TRANSFER_CONFIG], takes_connectors=True)
    pod = run(pool, client, written)
    assert "kv-transfer-config" in skip_reason(pod)
    assert_untouched(pod, written)


@pytest.mark.parametrize("level", ["baseline", "restricted"])
def test_a_namespace_under_pod_security_is_left_alone(
    pool: Cluster, client: PodTransport, make_namespace: Callable[..., str], level: str
) -> None:
    namespace = make_namespace("secure", **{"pod-security.kubernetes.io/enforce": level})
    pool.apply(stub_files(namespace, "0.31.0"))
    written = stub_pod(pool, "secure", namespace, annotations={"kvpool.io/pool": f"{NAMESPACE}/chat"})
    pod = run(pool, client, written)
    assert level in skip_reason(pod)
    assert_untouched(pod, written)


def policy(name: str, namespace: str, *expressions: str) -> list[dict[str, Any]]:
    """A rule of the cluster's for the pods of one namespace."""
    rules = [{"resources": ["pods"], "operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"]}]
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    spec = {"matchConstraints": {"resourceRules": rules}, "validations": [{"expression": e} for e in expressions]}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": selector}}
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    return [
        {**kind, "kind": "ValidatingAdmissionPolicy", "spec": spec},
        {**kind, "kind": "ValidatingAdmissionPolicyBinding", "spec": binding},
    ]


def test_a_policy_that_refuses_what_is_put_in_leaves_the_pod_as_its_owner_wrote_it(
    pool: Cluster, client: PodTransport, make_namespace: Callable[..., str]
) -> None:
    """It wants a label of every pod, too, which only its owner's pod has."""
    namespace = make_namespace("policy")
    no_host_path = "!object.spec.?volumes.orValue([]).exists(v, has(v.hostPath))"
    pool.apply(
        stub_files(namespace, "0.31.0"), *policy(namespace, namespace, no_host_path, "has(object.metadata.labels.app)")
    )
    written = stub_pod(pool, "ruled", namespace, annotations={"kvpool.io/pool": f"{NAMESPACE}/chat"})
    try:
        wait_for(lambda: is_refused(pool, namespace), seconds=30, what="the policy is in force")
        pod = run(pool, client, written)
        assert namespace in skip_reason(pod)
        assert_untouched(pod, written)
    finally:
        for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
            pool.kubectl("delete", kind, namespace)


def is_refused(cluster: Cluster, namespace: str) -> bool:
    """Whether a pod with a hostPath is, that nobody but the policy looks at."""
    pod = stub_pod(cluster, "tried", namespace)
    pod["metadata"]["labels"] = {"app": "tried"}
    pod["spec"]["volumes"].append({"name": "host", "hostPath": {"path": "/run"}})
    try:
        cluster.kubectl("create", "--dry-run=server", "--filename=-", stdin=json.dumps(pod))
    except CommandError:
        return True
    return False


@pytest.mark.local
def test_a_pod_that_may_land_where_the_image_is_missing_is_left_alone(pool: Cluster, client: PodTransport) -> None:
    node, image = pool.nodes[1], pool.image("kvpool")
    patch = {"spec": {"agent": {"imagePullPolicy": "Never"}}}
    pool.kubectl("patch", "kvpool", "chat", f"--namespace={NAMESPACE}", "--type=merge", f"--patch={json.dumps(patch)}")

    def is_rolled_out() -> bool:
        return condition(read_pool(pool, "chat", NAMESPACE), "RolloutComplete").get("status") == "True"

    wait_for(is_rolled_out, seconds=120, what="agents with the new pull policy")
    pool.remove_image(node, image)
    try:
        selector = "--selector=app.kubernetes.io/component=agent"
        pool.kubectl("delete", "pod", selector, f"--namespace={NAMESPACE}", f"--field-selector=spec.nodeName={node}")

        def is_without_image() -> bool:
            conditions = read_pool(pool, "chat", NAMESPACE)["status"]["conditions"]
            return any(c["reason"] == "ImagePullFailed" for c in conditions)

        wait_for(is_without_image, seconds=60, what="the pool names the missing image")
        written = stub_pod(pool, "no-image", NAMESPACE, node=node)
        pod = run(pool, client, written)
        assert "image" in skip_reason(pod).lower()
        assert_untouched(pod, written)
    finally:
        pool.restore_image(node, image)
    wait_pool_ready(pool, "chat", NAMESPACE)


@contextlib.contextmanager
def operator_scaled_to_nothing(cluster: Cluster) -> Iterator[None]:
    """The webhook is down: nobody answers the API server."""
    cluster.kubectl("scale", "deployment", "--all", "--replicas=0", f"--namespace={SYSTEM}")
    cluster.kubectl("wait", "pod", "--all", "--for=delete", f"--namespace={SYSTEM}", "--timeout=60s")
    try:
        yield
    finally:
        helm_install(cluster)


@contextlib.contextmanager
def operator_not_installed(cluster: Cluster) -> Iterator[None]:
    """The pool and its parts stay behind."""
    helm_uninstall(cluster)
    try:
        yield
    finally:
        helm_install(cluster)


@pytest.mark.parametrize("without_webhook", [operator_scaled_to_nothing, operator_not_installed])
def test_where_nobody_answers_the_api_server_pods_start_and_the_pool_counts_them_later(
    pool: Cluster,
    client: PodTransport,
    without_webhook: Callable[[Cluster], contextlib.AbstractContextManager[None]],
) -> None:
    with without_webhook(pool):
        written = stub_pod(pool, "missed", NAMESPACE)
        pod = run(pool, client, written)
        assert_untouched(pod, written)
        assert not skip_reason(pod)
    wait_counted(pool, "webhookMissed")
    wait_pool_ready(pool, "chat", NAMESPACE)
