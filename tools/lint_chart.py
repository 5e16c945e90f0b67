"""Lints and renders the chart with every set of values in charts/kvpool/ci (`make lint`).

Invariant: with a helm at hand, a template that does not render to well-formed objects, or a value that the schema refuses, is
a failure. Without one (helm is built with the test cluster) it says so; the unit tests check values and schema all the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.harness.provision_cache import cache_folder

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "kvpool"
RELEASE = "kvpool"
NAMESPACE = "kvpool-system"


class _UniqueKeys(yaml.SafeLoader):
    """A key that comes twice is an error: YAML parsers differ in which one they take."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.constructor.ConstructorError(None, None, "a key comes twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


class ChartError(Exception):
    """helm refused the chart, or what it made is no set of objects."""


def find_helm(environment: Mapping[str, str]) -> Path | None:
    """KVPOOL_HELM, else the newest one built with the test cluster, else the one on the PATH."""
    if chosen := environment.get("KVPOOL_HELM"):
        return Path(chosen)
    built = sorted(cache_folder(dict(environment)).glob("cluster-bin-*/helm"), key=lambda path: path.stat().st_mtime)
    if built:
        return built[-1]
    found = shutil.which("helm", path=environment.get("PATH"))
    return Path(found) if found else None


def scenarios() -> list[tuple[str, ...]]:
    """Arguments for each set of values: the defaults, then one for each file."""
    return [(), *(("--values", str(path)) for path in sorted((CHART / "ci").glob("*-values.yaml")))]


def render(helm: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a release."""
    text = _run(helm, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *arguments)
    try:
        documents = [document for document in yaml.load_all(text, Loader=_UniqueKeys) if document is not None]
    except yaml.YAMLError as error:
        raise ChartError(f"helm template {' '.join(arguments)} made no YAML: {error}") from error
    for document in documents:
        if not {"apiVersion", "kind", "metadata"} <= document.keys():
            raise ChartError(f"helm template {' '.join(arguments)} made something that is no object: {document}")
    return documents


def lint(helm: Path, arguments: Sequence[str]) -> None:
    """ChartError with helm's words unless it finds nothing to say."""
    _run(helm, "lint", "--strict", str(CHART), "--namespace", NAMESPACE, *arguments)


def _run(helm: Path, *arguments: str) -> str:
    done = subprocess.run([helm, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    if done.returncode != 0:
        raise ChartError(f"helm {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Lint and render everything; the exit status."""
    helm = find_helm(os.environ)
    if helm is None:
        print("chart: not rendered, there is no helm yet (`make cluster-up` builds it; or name one with KVPOOL_HELM)")
        return 0
    try:
        for arguments in scenarios():
            lint(helm, arguments)
            render(helm, arguments)
    except ChartError as error:
        print(f"chart: {error}", file=sys.stderr)
        return 1
    print(f"chart: {len(scenarios())} sets of values lint and render")
    return 0


if __name__ == "__main__":
    sys.exit(main())
