"""Only a pod that is refused for what injection adds counts as refused; verdicts are kept for a while."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.sample import sample_pods
from kvpool_operator.webhook.verdicts import VERDICT_SECONDS, VerdictCache
from tests.unit.webhook_pods import POOL


@dataclass
class Policies:
    """An API server that refuses by whether a pod has volumes."""

    plain: str = ""
    injected: str = ""
    error: Exception | None = None
    calls: list[str] = field(default_factory=list)
    now: float = 1000.0

    def dry_run(self, namespace: str, pod: Manifest) -> str:
        """The message of a refusal."""
        self.calls.append(namespace)
        if self.error is not None:
            raise self.error
        return self.injected if "volumes" in pod["spec"] else self.plain

    def cache(self) -> VerdictCache:
        """A cache over these policies and their clock."""
        return VerdictCache(self.dry_run, clock=lambda: self.now)


def test_the_samples_differ_by_what_is_injected_and_do_not_opt_in() -> None:
    plain, injected = sample_pods(POOL)
    assert "volumes" not in plain["spec"]
    assert [volume["name"] for volume in injected["spec"]["volumes"]] == [
        "kvpool-connector",
        "kvpool-socket",
        "kvpool-token",
    ]
    assert "kvpool.io/inject" not in {**injected["metadata"]["labels"], **plain["metadata"].get("labels", {})}


def test_a_refusal_is_passed_on() -> None:
    assert Policies(injected="no hostPath").cache().refusal("a", POOL) == "no hostPath"
    assert Policies().cache().refusal("a", POOL) == ""


def test_a_namespace_that_refuses_every_pod_does_not_refuse_ours() -> None:
    assert Policies(plain="exceeded quota", injected="exceeded quota").cache().refusal("a", POOL) == ""


def test_what_cannot_be_found_out_is_not_refused_and_asked_again() -> None:
    policies = Policies(error=TimeoutError("slow"))
    cache = policies.cache()
    assert cache.refusal("a", POOL) == ""
    policies.error, policies.injected = None, "no hostPath"
    assert cache.refusal("a", POOL) == "no hostPath"


def test_a_verdict_holds_for_a_while() -> None:
    policies = Policies(injected="no hostPath")
    cache = policies.cache()
    assert cache.refusal("a", POOL) == "no hostPath"
    policies.injected = ""
    policies.now += VERDICT_SECONDS - 1
    assert cache.refusal("a", POOL) == "no hostPath"
    policies.now += 2
    assert cache.refusal("a", POOL) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "elsewhere.example.com/kvpool:1.0"},
        {"image_pull_policy": "Never"},
        {"image_pull_secrets": ("registry",)},
        {"socket_folder": "/var/run/kvpool/default/other"},
        {"name": "other"},
        {"namespace": "other"},
    ],
)
def test_a_verdict_is_not_taken_for_a_pool_that_puts_something_else_into_the_pod(changes: dict[str, Any]) -> None:
    other = replace(POOL, **changes)
    refused = sample_pods(other)[1]
    cache = VerdictCache(lambda _, pod: "not this one" if pod == refused else "")
    for _ in range(2):
        assert cache.refusal("a", POOL) == ""
        assert cache.refusal("a", other) == "not this one"


def test_a_refresh_asks_before_a_verdict_ends() -> None:
    policies = Policies()
    cache = policies.cache()
    cache.refresh(["a", "b"], POOL)
    cache.refresh(["a", "b"], POOL)
    assert policies.calls == ["a", "b"]
    policies.now += VERDICT_SECONDS * 0.6
    cache.refresh(["a"], POOL)
    assert policies.calls == ["a", "b", "a"]
