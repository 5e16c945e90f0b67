"""Writes crds/kvpool.io_kvcachepools.yaml (`make generate`).

Invariant: the file is a function of tools/crd_*.py alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvpool_operator import names
from tools.crd_spec import spec, status
from tools.crd_types import rule, struct

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "crds" / f"{names.GROUP}_{names.PLURAL}.yaml"
HEADER = "# Written by `make generate` from tools/crd_*.py; edit those.\n"
NAME_RULE = rule(
    "self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    "metadata.name must be a DNS-1035 label of at most 40 characters: lower-case letters, digits and '-', "
    "beginning with a letter; choose a shorter or plainer name",
)


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.KIND.lower(),
                "shortNames": ["kvpool"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": columns(),
                    "schema": {"openAPIV3Schema": schema()},
                }
            ],
        },
    }


def schema() -> dict[str, Any]:
    """The whole object's schema."""
    return struct(
        "A KV cache that engines share: memory of their nodes, a Valkey behind it, a router in front.",
        {
            "apiVersion": {"type": "string", "description": "kvpool.io/v1alpha1."},
            "kind": {"type": "string", "description": "KVCachePool."},
            "metadata": {"type": "object"},
            "spec": spec(),
            "status": status(),
        },
        required=["spec"],
        extra={"x-kubernetes-validations": [NAME_RULE]},
    )


def columns() -> list[dict[str, Any]]:
    """What `kubectl get kvpool` shows."""
    ready = '.status.conditions[?(@.type=="Ready")]'
    paths = {
        "READY": f"{ready}.status",
        "AGENTS": ".status.summary.agents",
        "RAM": ".spec.ram.capacityPerNode",
        "VALKEY": ".status.summary.valkey",
        "URL": ".status.routing.url",
        "MESSAGE": ".status.summary.message",
    }
    shown = [{"name": name, "type": "string", "jsonPath": path} for name, path in paths.items()]
    return [*shown, {"name": "AGE", "type": "date", "jsonPath": ".metadata.creationTimestamp"}]


class _PlainDumper(yaml.SafeDumper):
    """Parts that are used twice are written twice: anchors are not for people."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 (of nothing)
        """Never an alias."""
        return True


def page() -> str:
    """The file's text."""
    return HEADER + yaml.dump(crd(), Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    FILE.write_text(page())
