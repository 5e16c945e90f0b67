"""The chart as helm renders it. Needs helm, which is built with the test cluster; touches no cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.lint_chart import CHART, ChartError, find_helm, lint, render, scenarios

EVERYTHING = ("--values", str(CHART / "ci" / "everything-values.yaml"))
Objects = list[dict[str, Any]]


@pytest.fixture(scope="module")
def helm() -> Path:
    """The command."""
    found = find_helm(os.environ)
    assert found is not None, "there is no helm: run `make cluster-up`, or name one with KVPOOL_HELM"
    return found


def only(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    """The one object of this kind and name."""
    found = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    assert len(found) == 1
    return found[0]


def pod_specs(objects: Objects) -> Iterator[dict[str, Any]]:
    """Of everything that makes pods."""
    return (each["spec"]["template"]["spec"] for each in objects if each["kind"] in {"Deployment", "Job"})


@pytest.mark.parametrize(
    "arguments", scenarios(), ids=lambda arguments: Path(arguments[-1]).stem if arguments else "defaults"
)
def test_every_set_of_values_lints_and_gives_distinct_objects(helm: Path, arguments: tuple[str, ...]) -> None:
    lint(helm, arguments)
    objects = render(helm, arguments)

    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "arguments", scenarios(), ids=lambda arguments: Path(arguments[-1]).stem if arguments else "defaults"
)
def test_every_pod_is_confined(helm: Path, arguments: tuple[str, ...]) -> None:
    for spec in pod_specs(render(helm, arguments)):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            confined = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["securityContext"] == confined
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


def test_only_whoever_is_given_the_right_may_write_pools(helm: Path) -> None:
    def gives(arguments: tuple[str, ...], role: str) -> set[str]:
        labels = only(render(helm, arguments), "ClusterRole", role)["metadata"]["labels"]
        return {name.rpartition("/")[2] for name in labels if name.startswith("rbac.authorization.k8s.io/")}

    assert gives((), "kvpool-view") == {"aggregate-to-view"}
    assert gives((), "kvpool-edit") == set()
    assert gives(EVERYTHING, "kvpool-edit") == {"aggregate-to-edit", "aggregate-to-admin"}


def test_the_crd_is_kept_and_can_be_left_out(helm: Path) -> None:
    crd = only(render(helm, ()), "CustomResourceDefinition", "kvcachepools.kvpool.io")

    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "CustomResourceDefinition" not in {each["kind"] for each in render(helm, ("--set", "crds.enabled=false"))}


def test_images_come_from_the_mirror_and_by_digest_where_those_are_given(helm: Path) -> None:
    operator = only(render(helm, EVERYTHING), "Deployment", "kvpool-operator")["spec"]["template"]["spec"]
    environment = {each["name"]: each.get("value") for each in operator["containers"][0]["env"]}

    image = operator["containers"][0]["image"]
    assert image.startswith("mirror.example.com:5000/cache/team/kvpool@sha256:")
    assert environment["KVPOOL_IMAGE"] == image
    assert environment["KVPOOL_VALKEY_IMAGE"] == "mirror.example.com:5000/cache/valkey:9.1"
    assert operator["imagePullSecrets"] == [{"name": "global-pull"}, {"name": "own-pull"}]


def test_selector_selects_the_operators_pods_and_no_others(helm: Path) -> None:
    objects = render(helm, ())
    deployment = only(objects, "Deployment", "kvpool-operator")["spec"]
    selector = deployment["selector"]["matchLabels"]

    assert selector.items() <= deployment["template"]["metadata"]["labels"].items()
    assert only(objects, "Service", "kvpool-operator")["spec"]["selector"] == selector
    assert only(objects, "PodDisruptionBudget", "kvpool-operator")["spec"]["selector"]["matchLabels"] == selector
    job = only(objects, "Job", "kvpool-pre-delete")["spec"]["template"]
    assert not selector.items() <= job["metadata"]["labels"].items()
    stated = [argument for argument in job["spec"]["containers"][0]["args"] if argument.startswith("--selector=")]
    assert stated == ["--selector=" + ",".join(f"{key}={value}" for key, value in selector.items())]


def test_the_hook_runs_after_its_rights_are_there_and_ends_before_helm_gives_up(helm: Path) -> None:
    hooks = [each for each in render(helm, ()) if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    weights = {each["kind"]: int(each["metadata"]["annotations"]["helm.sh/hook-weight"]) for each in hooks}

    assert {each["metadata"]["annotations"]["helm.sh/hook"] for each in hooks} == {"pre-delete"}
    assert max(weights, key=lambda kind: weights[kind]) == "Job"
    assert only(hooks, "Job", "kvpool-pre-delete")["spec"]["activeDeadlineSeconds"] < 300


def test_a_disabled_webhook_leaves_nothing_of_it(helm: Path) -> None:
    objects = render(helm, ("--set", "webhook.enabled=false"))
    operator = only(objects, "Deployment", "kvpool-operator")["spec"]["template"]["spec"]["containers"][0]

    assert not {"Service", "MutatingWebhookConfiguration"} & {each["kind"] for each in objects}
    assert {"name": "KVPOOL_WEBHOOK_PORT", "value": "0"} in operator["env"]
    rules = only(objects, "ClusterRole", "kvpool-operator")["rules"]
    assert [rule for rule in rules if rule["resources"] == ["pods"] and "create" in rule["verbs"]] == []


@pytest.mark.parametrize(
    ("mistake", "named"),
    [("operator.replica=3", "replica"), ("image.registry=https://registry.example.com", "registry")],
)
def test_a_mistake_in_the_values_is_refused(helm: Path, mistake: str, named: str) -> None:
    with pytest.raises(ChartError, match=named):
        render(helm, ("--set", mistake))
