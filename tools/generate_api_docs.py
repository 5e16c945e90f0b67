"""Writes docs/api.md from the CRD's schema (`make generate`).

Invariant: every field of the schema has its line, with type, default, bounds and meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.crd_types import Schema
from tools.generate_crd import schema

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
RULES = "x-kubernetes-validations"
OPAQUE = {"spec.agent.affinity", "spec.agent.tolerations[]"}
"""As in a pod: shown as one line."""
HEADER = """# KVCachePool (`kvpool.io/v1alpha1`)

<!-- Written by `make generate` from tools/crd_*.py; edit those. -->

Namespaced, short name `kvpool`. `kubectl explain kvpool.spec` says the same.
Names are DNS-1035 labels of at most 40 characters.
`kubectl annotate kvpool NAME kvpool.io/reconcile=paused` makes the operator leave a pool alone until the annotation is removed
or the pool is deleted.

```yaml
apiVersion: kvpool.io/v1alpha1
kind: KVCachePool
metadata: {name: chat, namespace: inference}
spec:
  agent:
    nodeSelector: {node.kubernetes.io/instance-type: gpu-large}
  ram: {capacityPerNode: 64Gi}
  valkey:
    managed: {shards: 3, memoryPerShard: 16Gi}
```

"""


def lines(path: str, field: Schema, *, required: bool) -> Iterator[str]:
    """Table rows of a field and those inside it."""
    yield f"| `{path}` | {_kind(field)} | {_default(field, required)} | {_meaning(field)} |"
    if path in OPAQUE:
        return
    needed = field.get("required", [])
    for name, inner in field.get("properties", {}).items():
        yield from lines(f"{path}.{name}", inner, required=name in needed)
    item = field.get("items", {})
    if item.get("type") == "object":
        yield from lines(f"{path}[]", item, required=False)


def _kind(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kind = str(field["type"])
    if "enum" in field:
        return " \\| ".join(field["enum"])
    if kind == "array":
        return f"list of {field['items']['type']}, {field.get('minItems', 0)} to {field['maxItems']}"
    if "additionalProperties" in field:
        return f"map, {field.get('minProperties', 0)} to {field['maxProperties']}"
    if "minimum" in field and "maximum" in field:
        return f"integer, {field['minimum']} to {field['maximum']}"
    return kind


def _default(field: Schema, required: bool) -> str:
    if required:
        return "required"
    default = field.get("default")
    return "" if default in (None, {}, "") else f"`{default}`"


def _meaning(field: Schema) -> str:
    rules = [str(rule["message"]) for rule in field.get(RULES, [])]
    said = [field.get("description", ""), *(f"Rule: {message}." for message in rules)]
    return " ".join(part for part in said if part).replace("|", "\\|")


def page() -> str:
    """The whole page."""
    parts = [HEADER.rstrip(), ""]
    for section in ("spec", "status"):
        parts += [f"## {section}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        field = schema()["properties"][section]
        needed = field.get("required", [])
        for name, inner in field["properties"].items():
            parts += lines(f"{section}.{name}", inner, required=name in needed)
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
