"""The examples fit together: workloads opt in to a pool that another example creates. Pools: test_operator_crd.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool_operator.webhook.engine_checks import ENGINE_CHECKS
from kvpool_operator.webhook.engine_command import Engine, find_engine

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


@pytest.mark.parametrize(("name", "port"), [("deployment.yaml", 8000), ("inferenceservice.yaml", 8080)])
def test_the_webhook_knows_the_engine_in_it(name: str, port: int) -> None:
    spec = example(name)["spec"]
    pod = {"metadata": {}, "spec": spec["predictor"] if "predictor" in spec else spec["template"]["spec"]}

    engine = find_engine(pod)

    assert isinstance(engine, Engine)
    assert engine.port == port
    assert [skip for check in ENGINE_CHECKS if (skip := check(engine))] == []


def test_a_deployment_selects_its_own_pods() -> None:
    spec = example("deployment.yaml")["spec"]

    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
