"""Writes docs/metrics.md from the metrics that the code declares: name, kind, labels and help text.

Invariant: a metric is on the page if and only if some module declares it with a constant name and help text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"
HEADER = """# Metrics

<!-- Written by `make generate` from the code that declares them; edit that. -->

Agent, router and operator serve theirs at `/metrics` of the admin port, the connector's are on the engine's own
`/metrics`. Counters end in `_total` when they are exported.
"""
PARTS = {
    "agent/kvpool_agent": "Agent",
    "agent/kvpool_router": "Router",
    "agent/kvpool_vllm": "Connector",
    "operator/kvpool_operator": "Operator",
}
KINDS = {
    "Counter": "counter",
    "Gauge": "gauge",
    "Histogram": "histogram",
    "OffloadingCounterMetadata": "counter",
    "OffloadingGaugeMetadata": "gauge",
    "OffloadingHistogramMetadata": "histogram",
}


@dataclass(frozen=True, slots=True, order=True)
class Metric:
    """One declared metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def metrics_in(source: str) -> Iterator[Metric]:
    """Every metric that a module declares."""
    tree = ast.parse(source)
    constants = {
        statement.targets[0].id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and (kind := _kind(node))
            and len(node.args) >= 2
            and _text(node.args[0], constants)
        ):
            yield _metric(kind, node.args, constants)
        elif isinstance(node, ast.Dict):
            for name, value in zip(node.keys, node.values, strict=True):
                if name is not None and isinstance(value, ast.Call) and (kind := _kind(value)):
                    yield _metric(kind, [name, *value.args], constants)


def _kind(call: ast.Call) -> str:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return KINDS.get(name, "")


def _metric(kind: str, arguments: list[ast.expr], constants: dict[str, ast.expr]) -> Metric:
    labels = (
        ast.literal_eval(arguments[2]) if len(arguments) > 2 and isinstance(arguments[2], ast.List | ast.Tuple) else ()
    )
    name, text = (_text(argument, constants) for argument in arguments[:2])
    suffix = "_total" if kind == "counter" and not name.endswith("_total") else ""
    return Metric(name + suffix, kind, tuple(labels), text)


def _text(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    node = constants.get(node.id, node) if isinstance(node, ast.Name) else node
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def page() -> str:
    """The whole page."""
    lines = [HEADER]
    for folder, title in PARTS.items():
        found = {
            metric
            for path in sorted((ROOT / folder).rglob("*.py"))
            for metric in metrics_in(path.read_text())
            if metric.name.startswith("kvpool_")
        }
        lines += [f"## {title}\n", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.text} |"
            for metric in sorted(found)
        ]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
