"""The CRD is what its generator says, structural and bounded; examples and documentation agree with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.pool import parse_pool
from tools import generate_api_docs, generate_crd
from tools.crd_types import ENDPOINT, ENDPOINT_MESSAGE, KEY_MESSAGE, LABEL_KEY, LABEL_VALUE, VALUE_MESSAGE

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("pool*.yaml"))
GIVEN_BY_SERVER = {"$", "$.metadata", "$.apiVersion", "$.kind"}


def fields(schema: dict[str, Any], path: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from fields(inner, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from fields(schema[key], f"{path}[]")


ALL = dict(fields(generate_crd.schema()))


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as strict validation takes it: unknown fields are errors."""
    copy: dict[str, Any] = {
        key: value for key, value in schema.items() if not key.startswith("x-kubernetes") and key != "format"
    }
    if "properties" in schema:
        copy["properties"] = {name: closed(inner) for name, inner in schema["properties"].items()}
        copy["additionalProperties"] = False
    if "items" in schema:
        copy["items"] = closed(schema["items"])
    return copy


def errors(spec: dict[str, Any]) -> list[str]:
    """Paths of what the schema (rules in CEL apart) finds wrong with a spec."""
    validator = jsonschema.Draft202012Validator(closed(generate_crd.schema()["properties"]["spec"]))
    return [error.json_path for error in validator.iter_errors(spec)]


def test_committed_files_are_what_the_generators_write() -> None:
    assert generate_crd.FILE.read_text() == generate_crd.page()
    assert generate_api_docs.PAGE.read_text() == generate_api_docs.page()


def test_every_string_list_and_map_is_bounded_so_that_rules_have_a_cost() -> None:
    unbounded = [
        path
        for path, schema in ALL.items()
        if (schema.get("type") == "string" and not {"maxLength", "enum", "format"} & schema.keys())
        or (schema.get("type") == "array" and "maxItems" not in schema)
        or ("additionalProperties" in schema and "maxProperties" not in schema)
        or ("x-kubernetes-int-or-string" in schema and "maxLength" not in schema)
    ]

    assert set(unbounded) <= GIVEN_BY_SERVER


def test_every_field_is_described_and_none_lets_unknown_fields_through() -> None:
    assert [path for path, schema in ALL.items() if path != "$.metadata" and not schema.get("description")] == []
    assert [path for path, schema in ALL.items() if "x-kubernetes-preserve-unknown-fields" in schema] == []


def test_nested_defaults_have_a_default_on_every_optional_parent() -> None:
    """The API server fills in a default only where the parent is there."""
    bare = []
    for path, schema in ALL.items():
        for name, inner in schema.get("properties", {}).items():
            has_defaults = any("default" in each for each in inner.get("properties", {}).values())
            optional = name not in schema.get("required", [])
            chosen = path.endswith((".valkey", "status"))  # absent means: not wanted
            if has_defaults and optional and not chosen and "default" not in inner:
                bare.append(f"{path}.{name}")

    assert bare == []


def test_every_rule_names_the_remedy() -> None:
    rules = [rule for schema in ALL.values() for rule in schema.get("x-kubernetes-validations", [])]

    assert len(rules) >= 7
    assert [rule["message"] for rule in rules if ":" not in rule["message"] and ";" not in rule["message"]] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_and_understood(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())

    assert errors(manifest["spec"]) == []
    manifest["metadata"]["uid"] = "u"
    assert parse_pool(manifest).name == manifest["metadata"]["name"]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"agent": {"nodeSelector": {}}, "ram": {"capacityPerNode": "1Gi"}}, "$.agent.nodeSelector"),
        ({"agent": {"nodeSelector": {"a": "b"}}, "ram": {"capacityPerNode": "1G"}}, "$.ram.capacityPerNode"),
        ({"agent": {"nodeSelector": {"a": "b"}}, "ram": {"capacityPerNode": "0Gi"}}, "$.ram.capacityPerNode"),
        (
            {"agent": {"nodeSelector": {"a": "b"}}, "ram": {"capacityPerNode": "1Gi"}, "routing": {"mode": "Other"}},
            "$.routing.mode",
        ),
        (
            {"agent": {"nodeSelector": {"a": "b"}}, "ram": {"capacityPerNode": "1Gi"}, "routing": {"replicas": 0}},
            "$.routing.replicas",
        ),
        ({"agent": {"nodeSelector": {"a": "b"}}, "ram": {"capacityPerNode": "1Gi"}, "tenancy": {}}, "$"),
    ],
)
def test_wrong_values_are_refused_by_name(spec: dict[str, Any], named: str) -> None:
    assert errors(spec) == [named]


@pytest.mark.parametrize(
    ("text", "is_key", "is_value"),
    [
        ("gpu", True, True),
        ("nvidia.com/gpu.present", True, False),
        ("A100-SXM4_80GB.x", True, True),
        ("", False, True),
        ("NVIDIA A100", False, False),
        ("-a", False, False),
        ("a//b", False, False),
        ("UPPER/a", False, False),
        ("a..b/c", False, False),
    ],
)
def test_labels_that_no_object_can_have_are_refused(text: str, *, is_key: bool, is_value: bool) -> None:
    assert (re.search(LABEL_KEY, text) is not None) == is_key
    assert (re.search(LABEL_VALUE, text) is not None) == is_value


@pytest.mark.parametrize(
    ("text", "is_endpoint"),
    [
        ("valkey:6379", True),
        ("valkey.example.com:1", True),
        ("10.0.0.1:65535", True),
        ("[fd00::1]:6379", True),
        ("[::ffff:10.0.0.1]:6379", True),
        ("valkey:0", False),
        ("valkey:65536", False),
        ("valkey:99999", False),
        ("valkey:06379", False),
        ("valkey", False),
        ("fd00::1:6379", False),
        ("[10.0.0.1]:6379", False),
        ("[valkey]:6379", False),
        (":6379", False),
        ("redis://valkey:6379", False),
    ],
)
def test_endpoints_that_nothing_can_be_at_are_refused(text: str, *, is_endpoint: bool) -> None:
    assert (re.search(ENDPOINT, text) is not None) == is_endpoint
    rules = ALL["$.spec.valkey.external.endpoints[]"]["x-kubernetes-validations"]
    assert [(one["rule"], one["message"]) for one in rules] == [(f"self.matches(r'{ENDPOINT}')", ENDPOINT_MESSAGE)]


@given(st.integers(0, 100_000))
def test_ports_are_from_1_to_65535(port: int) -> None:
    assert (re.search(ENDPOINT, f"valkey:{port}") is not None) == (1 <= port <= 65535)


@pytest.mark.parametrize(
    "path", ["$.spec.agent.nodeSelector", "$.spec.allowedNamespaces.selector.matchLabels"], ids=str
)
def test_selectors_have_rules_for_keys_and_values(path: str) -> None:
    assert [one["message"] for one in ALL[path]["x-kubernetes-validations"]] == [KEY_MESSAGE]
    assert [one["message"] for one in ALL[f"{path}[]"]["x-kubernetes-validations"]] == [VALUE_MESSAGE]


def test_columns_are_those_of_the_design() -> None:
    assert [column["name"] for column in generate_crd.columns()] == [
        "READY",
        "AGENTS",
        "RAM",
        "VALKEY",
        "URL",
        "MESSAGE",
        "AGE",
    ]
