"""The chart's values, their schema and the templates agree; what is generated is up to date."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tools import generate_chart_crd

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvpool"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
TEMPLATES = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}


def leaves(values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of all values; an empty map and a list are one value."""
    for name, value in values.items():
        here = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value:
            yield from leaves(value, here)
        else:
            yield here


def schema_leaves(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of all values that the schema names."""
    for name, inner in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        if "properties" in inner:
            yield from schema_leaves(inner, here)
        else:
            yield here


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The values as Helm merges them."""
    result = dict(values)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def errors(values: dict[str, Any]) -> list[str]:
    """Paths of what the schema refuses."""
    return [error.json_path for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(values)]


def test_schema_is_a_schema_and_takes_the_defaults() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)

    assert errors(VALUES) == []


@pytest.mark.parametrize("file", sorted((CHART / "ci").iterdir()), ids=lambda path: path.name)
def test_schema_takes_the_values_that_the_chart_is_tried_with(file: Path) -> None:
    assert errors(merged(VALUES, yaml.safe_load(file.read_text()))) == []


def test_schema_and_defaults_name_the_same_values() -> None:
    free = ("operator.resources.", "operator.affinity.")
    named = {path for path in schema_leaves(SCHEMA) if not path.startswith(free)}
    given = {path for path in leaves(VALUES) if not path.startswith(free)}

    assert given - {"operator.affinity"} == named


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"replicas": 2}, "$"),
        ({"operator": {"replica": 3}}, "$.operator"),
        ({"operator": {"replicas": "2"}}, "$.operator.replicas"),
        ({"operator": {"logLevel": "debug"}}, "$.operator.logLevel"),
        ({"image": {"registry": "https://registry.example.com"}}, "$.image.registry"),
        ({"image": {"registry": "registry.example.com/"}}, "$.image.registry"),
        ({"image": {"repository": "Team/kvpool"}}, "$.image.repository"),
        ({"image": {"digest": "0123"}}, "$.image.digest"),
        ({"image": {"pullPolicy": "Sometimes"}}, "$.image.pullPolicy"),
        ({"image": {"pullSecrets": [{"name": "pull"}]}}, "$.image.pullSecrets[0]"),
        ({"valkey": {"image": {"tag": ""}}}, "$.valkey.image.tag"),
        ({"webhook": {"port": 443}}, "$.webhook.port"),
        ({"webhook": {"port": 8081}}, "$.webhook.port"),
        ({"webhook": {"timeoutSeconds": 31}}, "$.webhook.timeoutSeconds"),
        ({"webhook": {"failurePolicy": "Fail"}}, "$.webhook"),
        ({"watchNamespaces": "inference"}, "$.watchNamespaces"),
        ({"crds": {"enabled": "yes"}}, "$.crds.enabled"),
    ],
)
def test_schema_refuses_what_is_wrong_and_names_it(changes: dict[str, Any], refused: str) -> None:
    assert errors(merged(VALUES, changes)) == [refused]


def test_every_value_is_used_and_every_used_value_exists() -> None:
    text = "\n".join(TEMPLATES.values())
    used = set(re.findall(r"\.Values\.([A-Za-z.]+)", text))
    by_image = {f"{image}.{key}" for image in ("image", "valkey.image") for key in VALUES["image"]}
    known = {*leaves(VALUES), *by_image, "image", "valkey.image", "operator.resources"}

    assert used - known == set()
    unused = {path for path in leaves(VALUES) if not any(path == use or path.startswith(use + ".") for use in used)}
    assert unused == set()


def test_the_charts_crd_is_what_the_generator_writes() -> None:
    assert generate_chart_crd.FILE.read_text() == generate_chart_crd.chart_crd(generate_chart_crd.SOURCE.read_text())


def test_a_crd_that_helm_would_expand_is_refused() -> None:
    with pytest.raises(ValueError, match="brace"):
        generate_chart_crd.chart_crd("metadata:\n  name: kvcachepools.kvpool.io\nspec: {{ x }}\n")


def test_the_chart_is_of_the_projects_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert chart["appVersion"] == version
    assert chart["version"].replace("-dev", ".dev0") == version


def test_the_operator_gets_every_setting_that_the_chart_writes() -> None:
    settings = (ROOT / "operator" / "kvpool_operator" / "settings.py").read_text()

    written = re.findall(r"- name: (KVPOOL_\w+)", TEMPLATES["deployment.yaml"])

    assert len(written) > 8
    assert [name for name in written if f'"{name}"' not in settings] == []


def test_the_webhook_configuration_leaves_the_certificate_to_the_operator_and_fails_open() -> None:
    webhook = TEMPLATES["webhook.yaml"]

    assert re.findall(r"^\s*caBundle", webhook, re.MULTILINE) == []
    assert "failurePolicy: Ignore" in webhook
