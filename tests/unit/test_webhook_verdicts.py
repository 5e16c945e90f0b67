"""Only a pod that is refused for what injection adds counts as refused; verdicts are kept for a while."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvpool_operator.kube_errors import UnavailableError
from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.dry_runs import build_trial
from kvpool_operator.webhook.verdicts import VERDICT_SECONDS, VerdictCache
from kvpool_operator.webhook_service import dry_run
from tests.unit.fake_api_server import FakeApiServer, Refusal, fake_api_server
from tests.unit.webhook_pods import engine_pod, injected, pool_with, recorded

PLAIN = engine_pod()
INJECTED = injected(PLAIN)


@dataclass
class Policies:
    """An API server that refuses by whether a pod has volumes."""

    plain: str = ""
    injected: str = ""
    error: Exception | None = None
    error_of_plain: Exception | None = None
    frees_quota: bool = False
    """After one trial everything is let in."""
    seconds: float = 0.0
    """How long a trial takes."""
    calls: list[str] = field(default_factory=list)
    now: float = 1000.0

    def dry_run(self, pod: Manifest) -> str:
        """The message of a refusal."""
        self.calls.append(pod["metadata"]["namespace"])
        self.now += self.seconds
        if self.error is not None:
            raise self.error
        is_plain = "volumes" not in pod["spec"]
        if is_plain and self.error_of_plain is not None:
            raise self.error_of_plain
        answer = self.plain if is_plain else self.injected
        if self.frees_quota:
            self.plain = self.injected = ""
        return answer

    def cache(self) -> VerdictCache:
        """A cache over these policies and their clock."""
        return VerdictCache(self.dry_run, clock=lambda: self.now)


def test_a_refusal_is_passed_on() -> None:
    assert Policies(injected="no hostPath").cache().refusal("a", PLAIN, INJECTED) == "no hostPath"
    assert Policies().cache().refusal("a", PLAIN, INJECTED) == ""


def test_a_namespace_that_refuses_every_pod_does_not_refuse_ours_and_is_asked_again() -> None:
    policies = Policies(plain="exceeded quota", injected="exceeded quota")
    cache = policies.cache()
    assert cache.refusal("a", PLAIN, INJECTED) == ""
    policies.plain, policies.injected = "", "no hostPath"
    assert cache.refusal("a", PLAIN, INJECTED) == "no hostPath"


def test_what_is_refused_besides_counts_too() -> None:
    policies = Policies(plain="no label team", injected="no label team; no hostPath")
    assert policies.cache().refusal("a", PLAIN, INJECTED) == "no label team; no hostPath"


def test_what_cannot_be_found_out_is_not_refused_and_asked_again() -> None:
    policies = Policies(error=TimeoutError("slow"))
    cache = policies.cache()
    assert cache.refusal("a", PLAIN, INJECTED) == ""
    policies.error, policies.injected = None, "no hostPath"
    assert cache.refusal("a", PLAIN, INJECTED) == "no hostPath"


def test_a_refusal_counts_where_it_is_not_known_whether_the_pod_as_it_came_is_let_in() -> None:
    """A missed cache, never a missed engine."""
    policies = Policies(injected="no hostPath", error_of_plain=TimeoutError("slow"))
    cache = policies.cache()
    assert cache.refusal("a", PLAIN, INJECTED) == "no hostPath"
    policies.plain, policies.error_of_plain = "no hostPath", None
    assert cache.refusal("a", PLAIN, INJECTED) == ""


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, ""), (0.7, ""), (1.2, "exceeded quota")])
def test_a_refusal_is_tried_once_more_before_it_is_believed_where_time_is_left(seconds: float, expected: str) -> None:
    """A quota may become free between the two trials."""
    policies = Policies(injected="exceeded quota", frees_quota=True, seconds=seconds)
    assert policies.cache().refusal("a", PLAIN, INJECTED) == expected


def test_an_expired_refusal_counts_where_nothing_newer_can_be_found_out() -> None:
    policies = Policies(injected="no hostPath")
    cache = policies.cache()
    assert cache.refusal("a", PLAIN, INJECTED) == "no hostPath"
    policies.now += VERDICT_SECONDS + 1
    policies.error = TimeoutError("slow")
    assert cache.refusal("a", PLAIN, INJECTED) == "no hostPath"
    policies.error, policies.injected = None, ""
    assert cache.refusal("a", PLAIN, INJECTED) == ""


def test_a_verdict_holds_for_a_while() -> None:
    policies = Policies(injected="no hostPath")
    cache = policies.cache()
    assert cache.refusal("a", PLAIN, INJECTED) == "no hostPath"
    policies.injected = ""
    policies.now += VERDICT_SECONDS - 1
    assert cache.refusal("a", PLAIN, INJECTED) == "no hostPath"
    policies.now += 2
    assert cache.refusal("a", PLAIN, INJECTED) == ""


def test_a_verdict_is_not_taken_for_a_pod_that_differs() -> None:
    other = copy.deepcopy(PLAIN)
    other["metadata"]["labels"]["team"] = "a"
    pairs = [
        (other, injected(other)),
        (PLAIN, injected(PLAIN, pool_with(image="elsewhere.example.com/kvpool:1.0"))),
        (PLAIN, injected(PLAIN, pool_with(socket_folder="/var/run/kvpool/default/other"))),
    ]
    policies = Policies()
    cache = policies.cache()
    assert cache.refusal("a", PLAIN, INJECTED) == ""
    policies.injected = "not this one"
    for plain, changed in pairs:
        assert cache.refusal("a", plain, changed) == "not this one"
    assert cache.refusal("b", PLAIN, INJECTED) == "not this one"
    assert cache.refusal("a", PLAIN, INJECTED) == ""


def test_pods_of_one_deployment_share_a_verdict() -> None:
    """They differ by the random name of the service account's token volume."""
    policies, pods = Policies(), []
    for suffix in ("x7k2p", "0abcd"):
        pod = engine_pod(volumeMounts=[{"name": f"kube-api-access-{suffix}", "mountPath": "/x"}])
        pod["spec"]["volumes"] = [{"name": f"kube-api-access-{suffix}", "projected": {}}]
        pods.append(pod)
    cache = policies.cache()
    for pod in pods:
        cache.refusal("a", pod, injected(pod))
    assert policies.calls == ["a"]


# --- what is tried ----------------------------------------------------------------------------------------------------


def test_a_trial_is_the_pod_without_what_only_servers_may_set() -> None:
    pod = recorded("inferenceservice-vllm-first-call.pod.json")
    pod["metadata"] |= {"uid": "u", "resourceVersion": "1", "creationTimestamp": None, "managedFields": [{}]}
    before = copy.deepcopy(pod)
    trial = build_trial(pod, "here")
    assert pod == before
    assert trial["spec"] == pod["spec"]
    assert trial["metadata"]["namespace"] == "here"
    assert trial["metadata"]["generateName"] == pod["metadata"]["generateName"]
    assert trial["metadata"]["annotations"] == pod["metadata"]["annotations"]
    assert not trial["metadata"].keys() & {"uid", "resourceVersion", "creationTimestamp", "managedFields"}
    assert [owner.get("blockOwnerDeletion") for owner in trial["metadata"]["ownerReferences"]] == [None]


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({"generateName": "llama-"}, "llama-trial"),
        ({"generateName": "x" * 63}, "x" * 58 + "trial"),
        ({"name": "llama-0", "generateName": "llama-"}, "llama-0"),
    ],
)
def test_trials_of_a_pod_have_one_name_so_that_refusals_can_be_compared(metadata: Manifest, name: str) -> None:
    assert build_trial({"metadata": metadata, "spec": {}}, "a")["metadata"]["name"] == name


def test_a_trial_does_not_call_the_webhook_again() -> None:
    for pod in (PLAIN, INJECTED):
        assert "kvpool.io/inject" not in build_trial(pod, "a")["metadata"]["labels"]
    assert "kvpool.io/inject" in PLAIN["metadata"]["labels"]


# --- what the API server answers --------------------------------------------------------------------------------------


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    """An API server."""
    with fake_api_server() as server:
        yield server


TRIAL = build_trial(PLAIN, "a")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (403, 'pods "llama-" is forbidden: violates PodSecurity'),
        (422, "spec.volumes[0]: Invalid value"),
        (400, "admission webhook x denied the request: no"),
        (413, "ValidatingAdmissionPolicy 'x' with binding 'y' denied request: too large"),
        (429, "admission webhook x denied the request: not now"),
        (500, "admission webhook x denied the request: no"),
    ],
)
def test_a_refusal_is_known_whatever_code_it_has(api: FakeApiServer, code: int, message: str) -> None:
    def refuse(_pod: Manifest) -> None:
        raise Refusal(code, message)

    api.on_dry_create = refuse
    assert message in dry_run(api.kube(), TRIAL)


@pytest.mark.parametrize("code", [429, 500, 503])
def test_an_api_server_that_cannot_say_has_not_refused(api: FakeApiServer, code: int) -> None:
    def fail(_pod: Manifest) -> None:
        raise Refusal(code, "failed calling webhook: context deadline exceeded")

    api.on_dry_create = fail
    with pytest.raises(UnavailableError):
        dry_run(api.kube(), TRIAL)


def test_nothing_is_made_by_a_dry_run(api: FakeApiServer) -> None:
    assert dry_run(api.kube(), TRIAL) == ""
    assert api.names("Pod") == []
