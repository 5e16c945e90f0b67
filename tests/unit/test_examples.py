"""The examples fit together: workloads opt in to a pool that another example creates. Pools: test_operator_crd.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> dict[str, Any]:
    """The one object of an example."""
    loaded: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())
    return loaded


def opting_in(workload: dict[str, Any]) -> dict[str, Any]:
    """The metadata that reach the pods."""
    meta: dict[str, Any] = workload["metadata"]
    if workload["kind"] == "Deployment":
        meta = workload["spec"]["template"]["metadata"]
    return meta


@pytest.mark.parametrize("name", ["deployment.yaml", "inferenceservice.yaml"])
def test_a_workload_names_the_pool_of_its_namespace(name: str) -> None:
    workload, pool = example(name), example("pool.yaml")
    meta = opting_in(workload)

    assert workload["metadata"]["namespace"] == pool["metadata"]["namespace"]
    assert meta["labels"]["kvpool.io/inject"] == "true"
    assert meta["annotations"]["kvpool.io/pool"] == pool["metadata"]["name"]


def test_a_deployment_selects_its_own_pods() -> None:
    spec = example("deployment.yaml")["spec"]

    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
