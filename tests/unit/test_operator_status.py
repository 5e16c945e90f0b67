"""What status says, and what it tells people to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator import names, projections, reasons
from kvpool_operator.observed import (
    AgentStats,
    Container,
    Node,
    Observed,
    Pod,
    Refusal,
    Rollout,
    ValkeyHealth,
    WarningEvent,
    Workload,
)
from kvpool_operator.status import build_status
from kvpool_operator.status.condition import Condition, changed, merge
from kvpool_operator.status.headline import HEADLINE_MAX, headline
from kvpool_operator.valkey.acl import EXTERNAL_RIGHTS
from tests.unit.operator_pools import EXTERNAL, MANAGED, make_pool

ROOT = Path(__file__).resolve().parents[2]

NOW = "2026-01-01T12:00:00Z"
NODE = Node(name="node-1", memory_bytes=8 << 30)


def agent_pod(*, ready: bool = False, uid: str = "a", **parts: Any) -> Pod:
    """An agent."""
    labels = {names.COMPONENT_LABEL: names.AGENT}
    defaults: dict[str, Any] = {"node": "node-1", "annotations": {names.CONFIG_HASH: "h"}, "phase": "Running"}
    return Pod(
        namespace="inference", name="chat-agent-x", uid=uid, is_ready=ready, labels=labels, **{**defaults, **parts}
    )


def daemon_set(*, desired: int = 1, existing: int = 1) -> Workload:
    """The agents' DaemonSet."""
    return Workload(kind="DaemonSet", name="chat-agent", uid="ds", desired=desired, existing=existing, config_hash="h")


ROUTERS = Workload(kind="Deployment", name="chat-router", uid="d", desired=2, existing=2, ready=2, updated=2)


def seen(**parts: Any) -> Observed:
    """All is well, but for `parts`."""
    defaults: dict[str, Any] = {
        "nodes": (NODE,),
        "pods": (agent_pod(ready=True),),
        "workloads": (daemon_set(), ROUTERS),
        "agent_memory_bytes": 2 << 30,
    }
    return Observed(**{**defaults, **parts})


def found(observed: Observed, kind: str, **spec: Any) -> dict[str, Any]:
    """A condition of a pool."""
    written = build_status(make_pool(**spec), observed, now=NOW)
    return next(one for one in written["conditions"] if one["type"] == kind)


def test_all_is_well() -> None:
    written = build_status(make_pool(), seen(), now=NOW)

    assert {one["type"]: one["status"] for one in written["conditions"]} == dict.fromkeys(
        reasons.CONDITION_TYPES, "True"
    )
    assert all(one["observedGeneration"] == 3 for one in written["conditions"])


WAITING = {
    reasons.IMAGE_PULL_FAILED: (
        agent_pod(containers=(Container(name="agent", image="kv:9", waiting_reason="ImagePullBackOff"),)),
        "image kv:9",
    ),
    reasons.CAPACITY_EXCEEDS_NODE: (
        agent_pod(node="", target_node="node-1", unscheduled="0/2 nodes are available: 1 Insufficient memory."),
        "node-1 has 8Gi",
    ),
    reasons.UNSCHEDULABLE: (agent_pod(node="", unscheduled="1 node(s) had untolerated taint {x: }"), "taint"),
    reasons.CONTAINER_CRASHING: (
        agent_pod(
            containers=(
                Container(name="agent", waiting_reason="CrashLoopBackOff", exit_code=2, finished_at=NOW, restarts=3),
            )
        ),
        "exit code 2",
    ),
    reasons.CONTAINER_RESTARTED: (
        agent_pod(
            containers=(Container(name="holder", exit_code=137, exit_reason="OOMKilled", finished_at=NOW, restarts=1),)
        ),
        "holder",
    ),
    reasons.PODS_STARTING: (agent_pod(), "is starting"),
}


@pytest.mark.parametrize("reason", WAITING)
def test_reason_of_a_waiting_agent_is_named(reason: str) -> None:
    pod, words = WAITING[reason]
    observed = seen(pods=(pod,))

    available, ready = (found(observed, kind) for kind in (reasons.AGENTS_AVAILABLE, reasons.READY))

    assert (available["status"], available["reason"]) == ("False", reason)
    assert words in available["message"]
    assert (ready["status"], ready["reason"]) == ("False", reason)


@pytest.mark.parametrize(
    "message",
    [
        'MountVolume.SetUp failed for volume "valkey" : secret "login" not found',
        'secret "login" not found',
    ],
)
def test_missing_secret_is_named(message: str) -> None:
    event = WarningEvent(object_uid="a", reason="FailedMount", message=message)

    available = found(seen(pods=(agent_pod(),), warnings=(event,)), reasons.AGENTS_AVAILABLE)

    assert available["reason"] == reasons.SECRET_MISSING
    assert "Secret login: create it in namespace inference" in available["message"]


def test_quota_that_refuses_a_pod_is_named() -> None:
    event = WarningEvent(
        object_uid="ds", reason="FailedCreate", message='pods "x" is forbidden: exceeded quota: q, requested: …'
    )
    observed = seen(pods=(), workloads=(daemon_set(existing=0), ROUTERS), warnings=(event,))

    available = found(observed, reasons.AGENTS_AVAILABLE)

    assert available["reason"] == reasons.QUOTA_EXCEEDED
    assert "raise the quota" in available["message"]


def test_pod_security_that_refuses_a_pod_is_named() -> None:
    event = WarningEvent(
        object_uid="ds", reason="FailedCreate", message='violates PodSecurity "baseline:latest": hostPath'
    )
    observed = seen(pods=(), workloads=(daemon_set(existing=0), ROUTERS), warnings=(event,))

    assert found(observed, reasons.AGENTS_AVAILABLE)["reason"] == reasons.POD_REFUSED


def test_quota_that_refuses_a_router_is_named_by_the_rollout_while_another_serves() -> None:
    routers = Workload(
        kind="Deployment",
        name="chat-router",
        uid="d",
        desired=2,
        existing=1,
        ready=1,
        updated=1,
        failure="exceeded quota: q",
    )
    observed = seen(workloads=(daemon_set(), routers))

    assert found(observed, reasons.ROLLOUT_COMPLETE)["reason"] == reasons.QUOTA_EXCEEDED
    assert found(observed, reasons.READY)["status"] == "True"


@pytest.mark.parametrize(("nodes", "words"), [((), "label nodes"), ((NODE,), "taints")])
def test_no_node_is_named(nodes: tuple[Node, ...], words: str) -> None:
    available = found(
        seen(nodes=nodes, pods=(), workloads=(daemon_set(desired=0, existing=0), ROUTERS)), reasons.AGENTS_AVAILABLE
    )

    assert available["reason"] == reasons.NO_NODE_MATCHES
    assert words in available["message"]


def test_node_that_is_away_is_named_though_its_pod_still_says_ready() -> None:
    away = Node(name="node-1", is_ready=False)
    written = build_status(make_pool(), seen(nodes=(away,)), now=NOW)

    assert written["unhealthyNodes"][0]["reason"] == reasons.NODE_NOT_READY
    assert written["agents"]["ready"] == 0


def test_arena_that_engines_still_map_is_named() -> None:
    stats = {"a": AgentStats(arena_reason="ArenaPending", waiting_for="engine x")}

    available = found(seen(pods=(agent_pod(),), stats=stats), reasons.AGENTS_AVAILABLE)

    assert available["reason"] == reasons.ARENA_PENDING
    assert "engine x" in available["message"]


def test_most_urgent_of_several_problems_is_shown_and_others_counted() -> None:
    pods = (
        agent_pod(uid="a"),
        agent_pod(uid="b", node="node-2", containers=(Container(name="agent", waiting_reason="ErrImagePull"),)),
    )

    available = found(seen(pods=pods, workloads=(daemon_set(desired=2, existing=2), ROUTERS)), reasons.AGENTS_AVAILABLE)

    assert available["reason"] == reasons.IMAGE_PULL_FAILED
    assert available["message"].endswith("(and 1 more)")


def test_at_most_ten_unhealthy_nodes_are_listed() -> None:
    pods = tuple(agent_pod(uid=str(number), node=f"node-{number}") for number in range(20))
    written = build_status(make_pool(), seen(pods=pods, workloads=(daemon_set(desired=20, existing=20),)), now=NOW)

    assert len(written["unhealthyNodes"]) == 10
    assert written["agents"] == {"desired": 20, "ready": 0, "updated": 20, "image": "", "enginesWithoutAgent": 0}


def test_engines_without_a_serving_agent_are_counted() -> None:
    engines = tuple(Pod(namespace="n", name=str(i), uid=str(i), node=f"node-{i}", phase="Running") for i in (1, 2))

    assert build_status(make_pool(), seen(engines=engines), now=NOW)["agents"]["enginesWithoutAgent"] == 1


def test_workloads_that_opt_in_are_counted_by_what_became_of_them() -> None:
    engine = Pod(namespace="n", name="e", uid="e", node="node-1", phase="Running")
    skipped = Pod(namespace="n", name="s", uid="s", annotations={names.SKIPPED_ANNOTATION: "X: y"})
    missed = Pod(namespace="n", name="m", uid="m")

    written = build_status(make_pool(), seen(engines=(engine,), candidates=(skipped, missed)), now=NOW)

    assert written["workloads"] == {"injected": 1, "skipped": 1, "webhookMissed": 1}


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        ("connected", "True", reasons.CONNECTED),
        ("unauthenticated", "False", reasons.VALKEY_PASSWORD_WRONG),
        ("unreachable", "False", reasons.VALKEY_UNREACHABLE),
        ("degraded", "False", reasons.VALKEY_DEGRADED),
        ("connecting", "Unknown", reasons.AWAITING_AGENTS),
        ("", "Unknown", reasons.AWAITING_AGENTS),
    ],
)
def test_external_valkey_is_what_agents_say(state: str, status: str, reason: str) -> None:
    observed = seen(stats={"a": AgentStats(is_ready=True, valkey_state=state)})

    tier = found(observed, reasons.VALKEY_AVAILABLE, valkey=EXTERNAL)

    assert (tier["status"], tier["reason"]) == (status, reason)


@pytest.mark.parametrize(
    ("state", "detail"),
    [
        ("unreachable", "forbidden"),
        ("unreachable", "3 of 3 shards: forbidden"),
        ("degraded", "forbidden: the user lacks +set: give it +@read on keys that begin with the pool's key prefix"),
    ],
)
def test_right_that_valkeys_user_lacks_is_named_with_all_that_it_needs(state: str, detail: str) -> None:
    observed = seen(stats={"a": AgentStats(is_ready=True, valkey_state=state, valkey_detail=detail)})

    condition = found(observed, reasons.VALKEY_AVAILABLE, valkey=EXTERNAL)

    assert (condition["status"], condition["reason"]) == ("False", reasons.VALKEY_FORBIDDEN)
    assert condition["message"].count(EXTERNAL_RIGHTS) == 1
    for page in ("docs/troubleshooting.md", "examples/pool-external-valkey.yaml"):
        assert EXTERNAL_RIGHTS in (ROOT / page).read_text()


SHARDS = Workload(kind="StatefulSet", name="chat-valkey", uid="s", desired=3, existing=3, ready=3, updated=3)
HEALTHY = ValkeyHealth(shards=3, ready=3, slots_covered=16384, replicas=3)


@pytest.mark.parametrize(
    ("state", "detail", "reason", "remedy"),
    [
        ("unreachable", "timed out", reasons.VALKEY_UNREACHABLE, "port 6379"),
        ("degraded", "1 of 3 shards", reasons.VALKEY_DEGRADED, "port 6379"),
        ("unauthenticated", "", reasons.VALKEY_PASSWORD_WRONG, "delete the pods of the shards"),
        ("unreachable", "forbidden: lacks +set", reasons.VALKEY_FORBIDDEN, "delete their pods one by one"),
    ],
)
def test_remedy_for_a_managed_valkey_names_nothing_of_an_external_one(
    state: str, detail: str, reason: str, remedy: str
) -> None:
    stats = {"a": AgentStats(is_ready=True, valkey_state=state, valkey_detail=detail)}
    observed = seen(stats=stats, valkey=HEALTHY, workloads=(daemon_set(), ROUTERS, SHARDS))

    tier = found(observed, reasons.VALKEY_AVAILABLE, valkey=MANAGED)

    assert (tier["status"], tier["reason"]) == ("False", reason)
    assert remedy in tier["message"]
    for foreign in ("external", "authSecretRef", "@read"):
        assert foreign not in tier["message"]


@pytest.mark.parametrize("valkey", [None, EXTERNAL, MANAGED])
def test_agents_that_the_operator_cannot_ask_are_named(valkey: dict[str, Any] | None) -> None:
    stats = {"a": AgentStats(error="TimeoutError: timed out")}
    observed = seen(stats=stats, valkey=HEALTHY, workloads=(daemon_set(), ROUTERS, SHARDS))
    spec = {} if valkey is None else {"valkey": valkey}

    available = found(observed, reasons.AGENTS_AVAILABLE, **spec)

    assert available["status"] == "True"
    for word in ("8081", "NetworkPolic", "timed out"):
        assert word in available["message"]
    if valkey is EXTERNAL:
        tier = found(observed, reasons.VALKEY_AVAILABLE, **spec)
        assert (tier["status"], tier["reason"]) == ("Unknown", reasons.AGENTS_SILENT)
        assert "8081" in tier["message"]


UNPULLABLE = agent_pod(
    uid="b", node="node-2", containers=(Container(name="agent", image="kv:9", waiting_reason="ErrImagePull"),)
)
ROLLING = Rollout(reason=reasons.ROLLING_OUT, message="1 of 2 agents run what the spec says: waiting for x")


def test_new_agent_that_cannot_start_is_named_at_once_in_a_rollout() -> None:
    observed = seen(
        pods=(agent_pod(ready=True), UNPULLABLE),
        workloads=(daemon_set(desired=2, existing=2), ROUTERS),
        rollout=ROLLING,
    )

    for kind in (reasons.AGENTS_AVAILABLE, reasons.ROLLOUT_COMPLETE):
        said = found(observed, kind)
        assert (said["status"], said["reason"]) == ("False", reasons.IMAGE_PULL_FAILED)
        assert "correct its name" in said["message"]
    assert found(observed, reasons.READY)["status"] == "False"


def test_new_agent_that_starts_is_part_of_a_rollout() -> None:
    pods = (agent_pod(ready=True), agent_pod(uid="b", node="node-2"))
    observed = seen(pods=pods, workloads=(daemon_set(desired=2, existing=2), ROUTERS), rollout=ROLLING)

    available = found(observed, reasons.AGENTS_AVAILABLE)
    assert (available["status"], available["reason"]) == ("True", reasons.ROLLING_OUT)
    assert found(observed, reasons.ROLLOUT_COMPLETE)["reason"] == reasons.ROLLING_OUT


def test_pool_without_a_serving_agent_is_never_ready() -> None:
    observed = seen(pods=(agent_pod(),), rollout=ROLLING)

    assert found(observed, reasons.AGENTS_AVAILABLE)["status"] == "False"
    assert found(observed, reasons.READY)["status"] == "False"


def test_agent_of_a_node_that_is_away_is_desired_though_the_daemon_set_does_not_count_it() -> None:
    nodes = (NODE, Node(name="node-2", is_ready=False))
    pods = (agent_pod(ready=True), agent_pod(uid="b", node="node-2"))

    available = found(seen(nodes=nodes, pods=pods), reasons.AGENTS_AVAILABLE)

    assert (available["status"], available["reason"]) == ("False", reasons.NODE_NOT_READY)
    assert available["message"].startswith("1 of 2 agents are ready: node node-2")
    alone = seen(nodes=nodes[1:], pods=pods[1:], workloads=(daemon_set(desired=0), ROUTERS))
    assert found(alone, reasons.AGENTS_AVAILABLE)["reason"] == reasons.NODE_NOT_READY


def test_lost_shard_is_named_and_ready_ends() -> None:
    health = ValkeyHealth(
        shards=3, ready=2, slots_covered=10922, replicas=3, waiting=(("ShardMissing", "chat-valkey-1"),)
    )
    shards = Workload(kind="StatefulSet", name="chat-valkey", uid="s", desired=3, existing=3, ready=3, updated=3)
    observed = seen(valkey=health, workloads=(daemon_set(), ROUTERS, shards))

    assert found(observed, reasons.VALKEY_AVAILABLE, valkey=MANAGED)["reason"] == reasons.SHARD_MISSING
    assert found(observed, reasons.READY, valkey=MANAGED)["status"] == "False"
    written = build_status(make_pool(valkey=MANAGED), observed, now=NOW)
    assert written["valkey"] == {"shards": 3, "ready": 2, "slotsCovered": 10922}
    assert written["summary"]["valkey"] == "2/3"


def test_refused_objects_and_rollouts_are_conditions() -> None:
    refusals = (Refusal(reason=reasons.NAME_CONFLICT, message="ConfigMap n/x"), Refusal(reason="y", message="z"))
    observed = seen(refusals=refusals, rollout=Rollout(reason=reasons.ROLLOUT_STOPPED, message="stopped"))

    assert found(observed, reasons.SPEC_ACCEPTED)["message"] == "ConfigMap n/x (and 1 more)"
    assert found(observed, reasons.ROLLOUT_COMPLETE)["reason"] == reasons.ROLLOUT_STOPPED


# --- conditions over time -----------------------------------------------------------------------------------------------

STATUSES = st.sampled_from(["True", "False", "Unknown"])


@given(st.lists(st.tuples(STATUSES, st.sampled_from(["A", "B"])), min_size=1, max_size=12))
def test_time_of_a_transition_is_when_status_last_changed(history: list[tuple[str, str]]) -> None:
    written: list[dict[str, Any]] = []
    last, since = "", ""
    for moment, (status, reason) in enumerate(history):
        written = merge(written, [Condition("Ready", status, reason, "m")], generation=1, now=f"t{moment}")
        if status != last:
            last, since = status, f"t{moment}"

        assert written[0]["lastTransitionTime"] == since


def test_only_changes_are_told() -> None:
    first = merge([], [Condition("Ready", "False", "A", "m")], generation=1, now="t0")
    same = merge(first, [Condition("Ready", "False", "A", "other words")], generation=2, now="t1")
    other = merge(first, [Condition("Ready", "False", "B", "m")], generation=2, now="t1")

    assert changed([], first) == first
    assert changed(first, same) == []
    assert changed(first, other) == other


# --- projections ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("1Ki", 1024), ("2Gi", 2 << 30), ("1500m", 1.5), ("3", 3), ("1e3", 1000), ("1M", 1e6), ("x", 0), ("", 0)],
)
def test_quantities_are_read(text: str, size: float) -> None:
    assert projections.amount(text) == size


def test_bare_objects_are_projected() -> None:
    meta = {"name": "x", "namespace": "n", "uid": "u"}

    assert projections.pod({"metadata": meta}).phase == "Pending"
    assert not projections.node({"metadata": meta}).is_ready
    assert projections.workload({"kind": "DaemonSet", "metadata": meta}).desired == 0
    assert projections.warning({"metadata": meta}).message == ""


def test_daemon_sets_pod_says_which_node_it_is_meant_for() -> None:
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-7"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    raw = {"metadata": {"name": "x", "namespace": "n", "uid": "u"}, "spec": {"affinity": {"nodeAffinity": required}}}

    assert projections.pod(raw).target_node == "node-7"


@given(st.text(max_size=400))
def test_headline_is_one_short_line_and_the_beginning_of_the_message(message: str) -> None:
    line = headline(message)

    assert len(line) <= HEADLINE_MAX
    assert len(line.splitlines()) <= 1
    whole = " ".join(message.split())
    assert line == whole if len(whole) <= HEADLINE_MAX else whole.startswith(line.removesuffix("…"))


def test_long_message_is_cut_between_words_for_the_table_and_whole_in_the_condition() -> None:
    waiting = Container(name="agent", image="i", waiting_reason="ErrImagePull", waiting_message="no " * 100)
    status = build_status(make_pool(), seen(pods=(agent_pod(containers=(waiting,)),)), now=NOW)

    ready = next(one for one in status["conditions"] if one["type"] == reasons.READY)
    short = status["summary"]["message"].removesuffix("…")
    assert len(ready["message"]) > 300
    assert ready["message"].startswith(short)
    assert ready["message"][len(short)] in " ,:;("
