"""What a pool's objects look like."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kvpool_operator import names
from kvpool_operator.observed import Namespace
from kvpool_operator.plan import agent, allowed_namespaces, plan
from kvpool_operator.plan.purge import build_purge_job
from kvpool_operator.plan.secrets import Generated, decode, generate
from tests.unit.operator_pools import EXTERNAL, GENERATED, MANAGED, SETTINGS, UID, inputs, make_pool

POOLS = {
    "managed": make_pool(valkey=MANAGED),
    "external": make_pool(valkey=EXTERNAL),
    "bare": make_pool(routing={"mode": "Disabled"}),
}


def objects(name: str, *, allowed: tuple[str, ...] = ("inference",)) -> dict[tuple[str, str], dict[str, Any]]:
    """Planned objects by kind and name."""
    planned = plan(POOLS[name], inputs(allowed=allowed), SETTINGS)
    return {(one["kind"], one["metadata"]["name"]): one for one in planned}


def pod_specs(name: str) -> list[dict[str, Any]]:
    """The pods of all workloads, the purge Job's too."""
    specs = [one["spec"]["template"]["spec"] for one in objects(name).values() if "template" in one.get("spec", {})]
    job = build_purge_job(POOLS[name], SETTINGS)
    return [*specs, *([job["spec"]["template"]["spec"]] if job else [])]


def containers(name: str) -> list[dict[str, Any]]:
    """Every container of every pod."""
    return [one for spec in pod_specs(name) for one in [*spec.get("initContainers", []), *spec["containers"]]]


@pytest.mark.parametrize("name", POOLS)
def test_every_object_says_whose_it_is(name: str) -> None:
    for one in objects(name).values():
        meta = one["metadata"]
        assert meta["labels"]["kvpool.io/pool-uid"] == UID
        assert meta["labels"]["app.kubernetes.io/managed-by"] == "kvpool-operator"
        owners = [owner["uid"] for owner in meta.get("ownerReferences", [])]
        assert owners == ([UID] if meta.get("namespace") == "inference" else [])


@pytest.mark.parametrize("name", POOLS)
def test_every_container_is_confined_but_the_one_that_owns_the_folder(name: str) -> None:
    for spec in pod_specs(name):
        context = spec["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 65532)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert "hostIPC" not in spec
        assert "hostNetwork" not in spec
    for one in containers(name):
        context = one["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        root = one["name"] == "socket-folder"
        assert context.get("runAsUser") == (0 if root else None)
        assert context["capabilities"] == {"drop": ["ALL"], **({"add": ["CHOWN"]} if root else {})}


@pytest.mark.parametrize("name", POOLS)
def test_memory_of_every_container_is_bounded(name: str) -> None:
    for one in containers(name):
        assert one["resources"]["limits"]["memory"]
        assert one["resources"]["requests"]["cpu"]


@pytest.mark.parametrize("name", POOLS)
def test_mounted_volumes_exist_and_every_volume_is_mounted(name: str) -> None:
    for spec in pod_specs(name):
        mounted = {
            mount["name"]
            for one in [*spec.get("initContainers", []), *spec["containers"]]
            for mount in one["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in spec.get("volumes", [])}


@pytest.mark.parametrize("name", POOLS)
def test_what_pods_refer_to_is_planned_before_them(name: str) -> None:
    seen: set[tuple[str, str]] = {("ConfigMap", "kube-root-ca.crt"), ("Secret", "login")}
    for one in plan(POOLS[name], inputs(), SETTINGS):
        template = one.get("spec", {}).get("template")
        if template:
            needed = {("ServiceAccount", template["spec"]["serviceAccountName"])}
            for volume in template["spec"]["volumes"]:
                if "configMap" in volume:
                    needed.add(("ConfigMap", volume["configMap"]["name"]))
                if "secret" in volume:
                    needed.add(("Secret", volume["secret"]["secretName"]))
            assert needed <= seen
        seen.add((one["kind"], one["metadata"]["name"]))


def test_holder_is_a_native_sidecar_whose_memory_covers_the_arena() -> None:
    daemon_set = objects("managed")["DaemonSet", "chat-agent"]
    assert daemon_set["spec"]["updateStrategy"] == {"type": "OnDelete"}
    folder, holder = daemon_set["spec"]["template"]["spec"]["initContainers"]

    assert (folder["name"], holder["name"], holder["restartPolicy"]) == ("socket-folder", "holder", "Always")
    memory = holder["resources"]
    assert int(memory["limits"]["memory"]) == int(memory["requests"]["memory"]) > 1 << 30


def test_requested_memory_is_what_status_compares_nodes_with() -> None:
    spec = objects("managed")["DaemonSet", "chat-agent"]["spec"]["template"]["spec"]
    sidecar = int(spec["initContainers"][1]["resources"]["requests"]["memory"])

    asked = sidecar + int(spec["containers"][0]["resources"]["requests"]["memory"])

    assert asked == agent.pod_memory_bytes(POOLS["managed"])


def test_gpu_taints_are_tolerated_beside_the_users_own() -> None:
    pool = make_pool(agent={"nodeSelector": {"gpu": "yes"}, "tolerations": [{"key": "mine", "operator": "Exists"}]})
    daemon_set = agent.build_daemon_set(pool, SETTINGS)

    keys = [one["key"] for one in daemon_set["spec"]["template"]["spec"]["tolerations"]]

    assert {"nvidia.com/gpu", "amd.com/gpu", "mine"} <= set(keys)


def test_fields_of_the_agent_reach_its_pods() -> None:
    affinity: dict[str, Any] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    pool = make_pool(
        agent={
            "nodeSelector": {"gpu": "yes"},
            "affinity": affinity,
            "priorityClassName": "high",
            "image": "mine:1",
            "imagePullPolicy": "Always",
            "imagePullSecrets": [{"name": "pull"}],
            "resources": {"requests": {"cpu": 2}, "limits": {"cpu": "4"}},
        }
    )
    spec = agent.build_daemon_set(pool, SETTINGS)["spec"]["template"]["spec"]

    assert (spec["affinity"], spec["priorityClassName"]) == (affinity, "high")
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    every = [*spec["initContainers"], *spec["containers"]]
    assert {(one["image"], one["imagePullPolicy"]) for one in every} == {("mine:1", "Always")}
    assert spec["containers"][0]["resources"]["requests"]["cpu"] == "2"
    assert spec["containers"][0]["resources"]["limits"]["cpu"] == "4"


def test_bare_pool_has_neither_router_nor_valkey() -> None:
    kinds = {kind for kind, _ in objects("bare")}

    assert kinds == {"Secret", "ServiceAccount", "ClusterRoleBinding", "ConfigMap", "DaemonSet"}


def test_router_may_watch_pods_where_engines_may_be_and_nowhere_else() -> None:
    planned = plan(POOLS["managed"], inputs(allowed=("other", "third")), SETTINGS)
    bound = {one["metadata"]["namespace"] for one in planned if one["kind"] == "RoleBinding"}

    assert bound == {"inference", "other", "third"}


def test_all_namespaces_are_one_cluster_wide_binding() -> None:
    planned = plan(POOLS["managed"], inputs(allowed=("*",)), SETTINGS)

    assert [one["kind"] for one in planned if one["kind"].endswith("Binding")] == ["ClusterRoleBinding"] * 2


def test_names_outside_the_namespace_never_meet() -> None:
    one = make_pool(metadata={"namespace": "a-b", "name": "c"})
    other = make_pool(metadata={"namespace": "a", "name": "b-c"})

    assert names.far_name(one, "router") != names.far_name(other, "router")


def test_service_of_the_router_follows_the_spec() -> None:
    pool = make_pool(routing={"service": {"type": "NodePort", "port": 8000, "annotations": {"a": "b"}}})
    service = next(one for one in plan(pool, inputs(), SETTINGS) if one["kind"] == "Service")

    assert service["spec"]["type"] == "NodePort"
    assert service["spec"]["ports"][0]["port"] == 8000
    assert service["metadata"]["annotations"] == {"a": "b"}
    assert names.router_url(pool) == "http://chat-router.inference.svc:8000"
    assert names.router_url(POOLS["managed"]) == "http://chat-router.inference.svc"


def test_change_of_the_configuration_makes_pods_outdated_and_of_the_namespaces_does_not() -> None:
    def agent_hash(pool_name: str, allowed: tuple[str, ...]) -> str:
        template = objects(pool_name, allowed=allowed)["DaemonSet", "chat-agent"]["spec"]["template"]
        return str(template["metadata"]["annotations"]["kvpool.io/config-hash"])

    assert agent_hash("managed", ("a",)) == agent_hash("managed", ("b",))
    assert agent_hash("managed", ("a",)) != agent_hash("external", ("a",))


def test_valkey_pods_are_parallel_and_found_before_they_are_ready() -> None:
    planned = objects("managed")

    assert planned["StatefulSet", "chat-valkey"]["spec"]["podManagementPolicy"] == "Parallel"
    assert planned["StatefulSet", "chat-valkey"]["spec"]["replicas"] == 3
    service = planned["Service", "chat-valkey"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


def test_no_password_stands_outside_a_secret_and_the_operators_in_none_of_the_pool() -> None:
    planned = plan(POOLS["managed"], inputs(), SETTINGS)
    secret = next(one for one in planned if one["metadata"]["name"] == "chat-valkey" and one["kind"] == "Secret")
    others = yaml.safe_dump([one for one in planned if one["kind"] != "Secret"])

    texts = decode(secret["data"])

    assert texts["agent-password"] == GENERATED.agent_password
    assert GENERATED.operator_password not in "".join(texts.values())
    for password in (GENERATED.agent_password, GENERATED.replication_password, GENERATED.token):
        assert password not in others


def test_generated_secrets_are_kept_and_completed() -> None:
    first = generate({}, make=iter(["a", "b", "c", "d"]).__next__)

    again = generate({"token": first.token, "agent-password": first.agent_password}, make=lambda: "new")

    assert again == Generated(token="a", operator_password="new", agent_password="c", replication_password="new")
    assert "new" not in repr(again)


def test_selector_chooses_namespaces_by_label() -> None:
    spaces = (
        Namespace(name="a", labels={"team": "x"}),
        Namespace(name="b", labels={"team": "y"}),
        Namespace(name="c", labels={"team": "x"}, is_terminating=True),
    )
    selector = {"matchExpressions": [{"key": "team", "operator": "In", "values": ["x"]}]}

    assert allowed_namespaces(make_pool(allowedNamespaces={"from": "Selector", "selector": selector}), spaces) == ("a",)
    assert allowed_namespaces(make_pool(), spaces) == ("inference",)
    assert allowed_namespaces(make_pool(allowedNamespaces={"from": "All"}), spaces) == ("*",)


def test_purge_job_is_for_external_keys_that_shall_go() -> None:
    job = build_purge_job(POOLS["external"], SETTINGS)

    assert job is not None
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--prefix") + 1] == "kvpool:inference/chat:"
    assert build_purge_job(POOLS["managed"], SETTINGS) is None
    kept = {"external": {"endpoints": ["v:1"], "deletionPolicy": "Retain"}}
    assert build_purge_job(make_pool(valkey=kept), SETTINGS) is None


def test_purge_runs_where_agents_may_run_too() -> None:
    """In a cluster of which every node has a taint it would wait in vain, and keys would be left."""
    pool = make_pool(valkey=EXTERNAL, agent={"nodeSelector": {"gpu": "yes"}, "tolerations": [{"key": "team"}]})
    job, daemon_set = build_purge_job(pool, SETTINGS), agent.build_daemon_set(pool, SETTINGS)

    assert job is not None
    tolerated = job["spec"]["template"]["spec"]["tolerations"]
    assert tolerated == daemon_set["spec"]["template"]["spec"]["tolerations"]
    assert {"key": "team"} in tolerated
