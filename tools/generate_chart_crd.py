"""Writes charts/kvpool/templates/crd.yaml from crds/ (`make generate`).

Invariant: rendered with crds.enabled, it is the CRD of crds/ with the chart's labels and the annotation by which Helm keeps
it; nothing of the CRD itself is a template.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "crds" / "kvpool.io_kvcachepools.yaml"
FILE = ROOT / "charts" / "kvpool" / "templates" / "crd.yaml"
NAME = "metadata:\n  name: kvcachepools.kvpool.io\n"
ADDED = """\
  labels:
    {{- include "kvpool.labels" . | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
"""


def chart_crd(crd: str) -> str:
    """The template made from the CRD's text; ValueError when that cannot be put into a template as it is."""
    if "{{" in crd or crd.count(NAME) != 1:
        raise ValueError(f"{SOURCE.name} has a brace that Helm would expand, or other metadata than a name")
    body = "".join(line for line in crd.splitlines(keepends=True) if not line.startswith("#"))
    return (
        f"# Written by `make generate` from crds/{SOURCE.name}; edit what that is made from.\n"
        "{{- if .Values.crds.enabled }}\n" + body.replace(NAME, NAME + ADDED) + "{{- end }}\n"
    )


def main() -> None:
    """Write the file."""
    FILE.write_text(chart_crd(SOURCE.read_text()))


if __name__ == "__main__":
    main()
