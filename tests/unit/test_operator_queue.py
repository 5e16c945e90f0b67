"""The queue of pools, the pokes that fill it, and the workers."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvpool_core.errors import ConfigError
from kvpool_operator import handlers, names
from kvpool_operator.pokes import News, pool_key
from kvpool_operator.settings import read_settings
from kvpool_operator.work_queue import BACKOFF_CAP_SECONDS, WorkQueue, backoff_seconds


class Clock:
    """Moves when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_queue() -> tuple[WorkQueue[str], Clock]:
    """A queue and its clock."""
    clock = Clock()
    return WorkQueue(monotonic=clock, jitter=lambda: 0.5), clock


def test_key_waits_once_however_often_it_is_added() -> None:
    queue, _ = make_queue()
    for _ in range(3):
        queue.add("a")

    assert queue.take(0) == "a"
    assert queue.take(0) is None


def test_earlier_of_two_times_counts() -> None:
    queue, clock = make_queue()
    queue.add("a", 10)
    queue.add("a", 1)
    queue.add("a", 5)
    clock.now = 1

    assert queue.take(0) == "a"
    assert len(queue) == 0


def test_key_added_while_it_is_worked_on_comes_again_afterwards_and_not_before() -> None:
    queue, _ = make_queue()
    queue.add("a")
    assert queue.take(0) == "a"
    queue.add("a")
    assert queue.take(0) is None

    queue.done("a")

    assert queue.take(0) == "a"


def test_failing_key_comes_later_and_later_until_it_succeeds() -> None:
    queue, clock = make_queue()
    queue.add("a")
    pauses: list[float] = []
    for _ in range(12):
        assert queue.take(0) == "a"
        queue.failed("a")
        clock.now += BACKOFF_CAP_SECONDS * 2
        pauses.append(backoff_seconds(len(pauses) + 1, 0.5))
    assert pauses == sorted(pauses)
    assert max(pauses) == BACKOFF_CAP_SECONDS
    assert queue.take(0) == "a"
    queue.done("a", 3)
    clock.now += 3

    assert queue.take(0) == "a"


def test_waiting_worker_is_woken() -> None:
    queue: WorkQueue[str] = WorkQueue()
    taken: list[str | None] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take(30)))
    thread.start()
    queue.add("a")
    thread.join(10)

    assert taken == ["a"]


def test_closed_queue_gives_nothing_out() -> None:
    queue, _ = make_queue()
    queue.add("a")
    queue.close()

    assert queue.take(0) is None


# --- pokes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "meta", "key"),
    [
        (names.KIND, {"namespace": "n", "name": "p"}, ("n", "p")),
        ("Pod", {"labels": {names.POOL_LABEL: "p", names.POOL_NAMESPACE_LABEL: "n"}}, ("n", "p")),
        (
            "Service",
            {"namespace": "n", "name": "p-router", "ownerReferences": [{"kind": names.KIND, "name": "p"}]},
            ("n", "p"),
        ),
        ("Pod", {"labels": {names.POOL_LABEL: "p"}}, None),
        ("Service", {}, None),
    ],
)
def test_event_leads_to_the_pool_that_it_is_about(kind: str, meta: dict[str, Any], key: tuple[str, str] | None) -> None:
    assert pool_key(kind, {"metadata": meta}) == key


def node(ready: str, *, beat: int) -> dict[str, Any]:
    """A node with a heartbeat."""
    return {
        "metadata": {"name": "n", "resourceVersion": str(beat)},
        "status": {"conditions": [{"type": "Ready", "status": ready, "lastHeartbeatTime": beat}]},
    }


def test_heartbeats_of_nodes_are_no_news_and_changes_are() -> None:
    news = News()

    told = [
        news.is_news("Node", node(ready, beat=beat), is_gone=False)
        for beat, ready in enumerate(["True", "True", "False"])
    ]

    assert told == [True, False, True]
    assert news.is_news("Node", node("False", beat=9), is_gone=True)
    assert not news.is_news("Node", node("False", beat=9), is_gone=True)


def test_status_of_a_pool_is_no_news_since_we_write_it_ourselves() -> None:
    """A message with a number that changes would otherwise lead from look to look without a pause."""
    news = News()

    def is_news(*, ready: int, namespace: str = "a", is_gone: bool = False, **meta: Any) -> bool:
        raw = {
            "metadata": {"namespace": namespace, "name": "chat", "uid": "u", "resourceVersion": str(ready), **meta},
            "status": {"agents": {"ready": ready}},
        }
        return news.is_news(names.KIND, raw, is_gone=is_gone)

    assert is_news(ready=1, generation=1)
    assert not is_news(ready=2, generation=1)
    assert is_news(ready=2, generation=2)
    assert is_news(ready=2, generation=2, annotations={names.RECONCILE_ANNOTATION: "paused"})
    assert is_news(ready=2, generation=2, annotations={}, deletionTimestamp="2026-01-01T00:00:00Z")
    assert is_news(ready=2, generation=2, namespace="b")
    assert is_news(ready=2, generation=2, is_gone=True)
    assert is_news(ready=2, generation=2)


def test_kopf_is_given_event_handlers_only_and_writes_nothing_by_itself() -> None:
    registry = handlers.build_registry(lambda _kind, _raw, _gone: None)
    settings = handlers.build_settings()

    assert registry._changing._handlers == []  # these are what puts finalizers and annotations on objects
    assert registry._spawning._handlers == []
    assert not settings.posting.enabled
    assert settings.peering.standalone


# --- settings -----------------------------------------------------------------------------------------------------------

COMPLETE = {
    "KVPOOL_NAMESPACE": "kvpool-system",
    "KVPOOL_IDENTITY": "pod-1",
    "KVPOOL_IMAGE": "kvpool:1",
    "KVPOOL_VALKEY_IMAGE": "valkey:9",
}


def test_settings_come_from_the_environment() -> None:
    settings = read_settings({**COMPLETE, "KVPOOL_WATCH_NAMESPACES": "b, a,", "KVPOOL_WORKERS": "7"})

    assert settings.watched_namespaces == ("a", "b")
    assert settings.workers == 7
    assert settings.service_name == "kvpool-operator"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"KVPOOL_NAMESPACE": ""}, "KVPOOL_NAMESPACE"),
        ({"KVPOOL_IMAGE_PULL_POLICY": "Sometimes"}, "KVPOOL_IMAGE_PULL_POLICY"),
        ({"KVPOOL_WORKERS": "many"}, "KVPOOL_WORKERS"),
        ({"KVPOOL_HEALTH_PORT": "70000"}, "KVPOOL_HEALTH_PORT"),
    ],
)
def test_wrong_environment_is_named(change: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_settings({**COMPLETE, **change})
