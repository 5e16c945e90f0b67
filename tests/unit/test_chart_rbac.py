"""What the chart grants: enough for every kind that the operator deals with, and no more than was decided."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool_operator.resources import OWNED_KINDS, RESOURCES

TEMPLATE = Path(__file__).resolve().parents[2] / "charts" / "kvpool" / "templates" / "rbac.yaml"
WRITTEN_BY_APPLY = {"create", "patch", "delete"}
READ = {"get", "list", "watch"}


def roles() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(kind, name) -> rules, with the template's expressions replaced by the names of what they stand for."""
    text = re.sub(r'\{\{ include "kvpool\.(\w+)" \. \}\}', r"\1", TEMPLATE.read_text())
    text = re.sub(r"\{\{ \$(\w+) \}\}", r"\1", text)
    text = re.sub(r"\{\{.*?\}\}", "", text)
    objects = [document for document in yaml.safe_load_all(text) if "rules" in document]
    return {(each["kind"], each["metadata"]["name"]): each["rules"] for each in objects}


OPERATOR = roles()["ClusterRole", "operator"]


def verbs(rules: list[dict[str, Any]], group: str, resource: str) -> set[str]:
    """Everything that may be done with all objects of a resource."""
    return {
        verb
        for rule in rules
        if group in rule["apiGroups"] and resource in rule["resources"] and "resourceNames" not in rule
        for verb in rule["verbs"]
    }


def test_there_are_no_other_roles() -> None:
    assert set(roles()) == {
        ("ClusterRole", "agentRole"),
        ("ClusterRole", "routerRole"),
        ("ClusterRole", "operator"),
        ("Role", "operator"),
    }


def test_agents_and_routers_get_one_thing_each() -> None:
    assert roles()["ClusterRole", "agentRole"] == [
        {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}
    ]
    assert roles()["ClusterRole", "routerRole"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": [*sorted(READ)]}
    ]


@pytest.mark.parametrize("kind", OWNED_KINDS)
def test_the_operator_may_keep_what_a_pool_owns(kind: str) -> None:
    resource = RESOURCES[kind]
    group = resource.api_version.rpartition("/")[0]

    assert verbs(OPERATOR, group, resource.plural) == READ | WRITTEN_BY_APPLY


@pytest.mark.parametrize("kind", sorted(RESOURCES.keys() - {"Lease", "Secret", "MutatingWebhookConfiguration"}))
def test_the_operator_may_look_at_every_kind_it_knows(kind: str) -> None:
    resource = RESOURCES[kind]
    group = resource.api_version.rpartition("/")[0]

    assert {"get", "list"} <= verbs(OPERATOR, group, resource.plural)


def test_secrets_elsewhere_are_written_and_never_read() -> None:
    assert verbs(OPERATOR, "", "secrets") == WRITTEN_BY_APPLY
    assert verbs(roles()["Role", "operator"], "", "secrets") >= READ | WRITTEN_BY_APPLY


def test_only_the_roles_of_agents_and_routers_can_be_bound() -> None:
    bindable = [rule for rule in OPERATOR if "bind" in rule["verbs"]]

    assert [rule["resourceNames"] for rule in bindable] == [["agentRole", "routerRole"]]


def test_only_its_own_webhook_configuration_can_be_changed() -> None:
    rules = [rule for rule in OPERATOR if "admissionregistration.k8s.io" in rule["apiGroups"]]

    assert [(rule["resourceNames"], rule["verbs"]) for rule in rules] == [(["webhookConfiguration"], ["get", "patch"])]


def test_nothing_is_granted_by_a_wildcard_and_no_escalation() -> None:
    rules = [rule for each in roles().values() for rule in each]

    assert [rule for rule in rules if "*" in rule["verbs"] + rule["resources"] + rule["apiGroups"]] == []
    assert {verb for rule in rules for verb in rule["verbs"]} & {"escalate", "impersonate", "deletecollection"} == set()
    assert [rule for rule in rules if "pods/exec" in rule["resources"]] == []
