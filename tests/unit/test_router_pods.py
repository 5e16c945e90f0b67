"""Which pods are endpoints and agents, and how a router follows them through an API server that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvpool_core.namespace_file import AllowedNamespaces, NamespaceFile, parse_namespaces
from kvpool_router import pod_watch
from kvpool_router.addresses import canonical_address, join_address
from kvpool_router.config import KubernetesDiscovery, Pool
from kvpool_router.discovery import Members
from kvpool_router.metrics import RouterMetrics
from kvpool_router.pod_watch import PodMembers
from kvpool_router.pods import members_of, project_pod
from tests.unit.fake_kubernetes import FakeKubernetes, Manifest, running_kubernetes
from tests.unit.router_stubs import until

SETTINGS = KubernetesDiscovery(namespaces_file="/n", token_file="/t")


def pod(
    name: str,
    *,
    namespace: str = "chat",
    role: str = "engine",
    ip: str = "10.0.0.1",
    node: str = "node-a",
    created: str = "2026-01-01T00:00:00Z",
) -> Manifest:
    """A pod of the pool `main` in `infer`, running and ready."""
    labels = {"kvpool.io/pool": "main", "kvpool.io/pool-namespace": "infer"}
    labels |= {"kvpool.io/role": "engine"} if role == "engine" else {"app.kubernetes.io/component": role}
    annotations = {"kvpool.io/port": "8000"} if role == "engine" else {}
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": labels,
            "annotations": annotations,
            "creationTimestamp": created,
        },
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def changed(manifest: Manifest, part: str, **fields: Any) -> Manifest:
    """The manifest with fields of a part replaced."""
    return {**manifest, part: {**manifest[part], **fields}}


def found(*manifests: Manifest, allowed: str = "chat") -> tuple[list[str], list[str]]:
    """Addresses of endpoints, and agents as name@url."""
    members = members_of(
        map(project_pod, manifests), allowed=parse_namespaces(allowed), pool_namespace="infer", settings=SETTINGS
    )
    return [spec.address for spec in members.endpoints], [f"{agent.name}@{agent.url}" for agent in members.agents]


# --- which pods -------------------------------------------------------------------------------------------------------


def test_ready_engine_and_running_agent_are_members() -> None:
    agent = changed(pod("agent", namespace="infer", role="agent", ip="10.0.0.9"), "status", conditions=[])
    assert found(pod("a"), agent) == (["10.0.0.1:8000"], ["node-a@http://10.0.0.9:8081"])


def test_engine_knows_the_agent_of_its_node() -> None:
    members = members_of(
        [project_pod(pod("a", node="node-b"))],
        allowed=AllowedNamespaces(everything=True),
        pool_namespace="infer",
        settings=SETTINGS,
    )
    assert members.endpoints[0].agent == "node-b"
    assert members.endpoints[0].url == "http://10.0.0.1:8000"


@pytest.mark.parametrize(
    "manifest",
    [
        changed(pod("a"), "metadata", deletionTimestamp="2026-01-01T00:01:00Z"),
        changed(pod("a"), "metadata", annotations={}),
        changed(pod("a"), "metadata", annotations={"kvpool.io/port": "http"}),
        changed(pod("a"), "metadata", annotations={"kvpool.io/port": "70000"}),
        changed(pod("a"), "status", conditions=[{"type": "Ready", "status": "False"}]),
        changed(pod("a"), "status", conditions=[]),
        changed(pod("a"), "status", phase="Pending"),
        changed(pod("a"), "status", phase="Failed"),
        changed(pod("a"), "status", podIP=""),
        changed(pod("a"), "metadata", labels={"kvpool.io/inject": "true"}),
        pod("a", namespace="stranger"),
        {"metadata": {}, "spec": None},
    ],
)
def test_other_pods_are_no_endpoints(manifest: Manifest) -> None:
    assert found(manifest) == ([], [])


def test_agent_outside_the_pools_namespace_is_not_believed() -> None:
    assert found(pod("fake", namespace="chat", role="agent")) == ([], [])


def test_newer_pod_counts_where_two_have_one_place() -> None:
    old, new = (
        pod(name, namespace="infer", role="agent", ip=ip, created=created)
        for name, ip, created in (
            ("old", "10.0.0.2", "2026-01-01T00:00:00Z"),
            ("new", "10.0.0.3", "2026-01-02T00:00:00Z"),
        )
    )
    assert found(new, old)[1] == ["node-a@http://10.0.0.3:8081"]
    ending = changed(new, "metadata", deletionTimestamp="2026-01-03T00:00:00Z")
    assert found(ending, old)[1] == ["node-a@http://10.0.0.2:8081"]
    assert found(pod("a"), pod("b"))[0] == ["10.0.0.1:8000"]


def test_star_allows_every_namespace() -> None:
    assert found(pod("a", namespace="any"), allowed="*")[0] == ["10.0.0.1:8000"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1:8000/", "10.0.0.1:8000"),
        ("fd00::1:8000", "[fd00::1]:8000"),
        ("[fd00:0:0::1]:8000", "[fd00::1]:8000"),
        ("Engine.Local:8000", "engine.local:8000"),
        ("10.0.0.1", "10.0.0.1"),
        ("", ""),
    ],
)
def test_address_has_one_spelling(text: str, address: str) -> None:
    assert canonical_address(text) == address


def test_engines_and_pods_name_an_ipv6_endpoint_alike() -> None:
    assert found(pod("a", ip="fd00::1"))[0] == [canonical_address("fd00::1:8000")] == [join_address("fd00:0::1", 8000)]


# --- the file ---------------------------------------------------------------------------------------------------------


def test_namespaces_are_read_when_the_file_changes_and_kept_when_it_cannot_be_read(tmp_path: Path) -> None:
    file = NamespaceFile(tmp_path / "allowed")
    assert not file.refresh()
    assert "a" not in file.allowed
    (tmp_path / "allowed").write_text("a\n\n  b \n")
    assert file.refresh()
    assert ("a" in file.allowed, "b" in file.allowed, "c" in file.allowed) == (True, True, False)
    assert not file.refresh()
    (tmp_path / "allowed").unlink()
    assert not file.refresh()
    assert file.problem
    assert "a" in file.allowed
    (tmp_path / "allowed").write_text("*\n")
    assert file.refresh()
    assert ("c" in file.allowed, file.problem) == (True, "")


# --- watching ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    with running_kubernetes() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        yield server


class Follower:
    """What a router would have learnt."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "allowed"
        settings = KubernetesDiscovery(namespaces_file=str(self.file), token_file="/t")
        self.source = PodMembers(Pool(namespace="infer", name="main"), settings)
        self.members: Members | None = None
        self.metrics = RouterMetrics(CollectorRegistry())

    async def run(self) -> None:
        async for members in self.source.watch(self.metrics):
            self.members = members

    @property
    def addresses(self) -> list[str] | None:
        return None if self.members is None else [spec.address for spec in self.members.endpoints]

    def failing(self) -> float:
        return self.metrics.registry.get_sample_value("kvpool_router_pod_watches_failing") or 0.0


@asynccontextmanager
async def following(folder: Path, allowed: str = "chat\n") -> AsyncIterator[Follower]:
    follower = Follower(folder)
    follower.file.write_text(allowed)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_pods_come_change_and_go(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    kubernetes.put_pod(pod("a"))
    kubernetes.put_pod(pod("agent", namespace="infer", role="agent", ip="10.0.0.9"))
    kubernetes.put_pod(changed(pod("other"), "metadata", labels={"kvpool.io/pool": "another"}))

    async def run() -> None:
        async with following(tmp_path) as follower:
            await until(lambda: follower.addresses == ["10.0.0.1:8000"])
            assert follower.members is not None
            assert [agent.url for agent in follower.members.agents] == ["http://10.0.0.9:8081"]
            await until(lambda: kubernetes.watching == 2)
            kubernetes.put_pod(pod("b", ip="10.0.0.2"))
            await until(lambda: follower.addresses == ["10.0.0.1:8000", "10.0.0.2:8000"])
            kubernetes.put_pod(changed(pod("a"), "metadata", deletionTimestamp="2026-01-01T00:01:00Z"))
            await until(lambda: follower.addresses == ["10.0.0.2:8000"])
            kubernetes.delete_pod("chat", "b")
            await until(lambda: follower.addresses == [])
            assert kubernetes.lists == 2, "what the watch tells is not listed again"

    asyncio.run(run())


def test_watch_goes_on_from_the_last_bookmark(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    kubernetes.put_pod(pod("a"))

    async def run() -> None:
        async with following(tmp_path, "*\n") as follower:
            await until(lambda: kubernetes.watching == 1)
            kubernetes.put_pod(changed(pod("x"), "metadata", labels={}))  # moves the version, not ours
            kubernetes.bookmark()
            kubernetes.end_watches()
            await until(lambda: len(kubernetes.watches) == 2)
            first, second = (int(query["resourceVersion"]) for query in kubernetes.watches)
            assert second == first + 1
            assert kubernetes.watches[0]["allowWatchBookmarks"] == "true"
            assert kubernetes.watches[0]["labelSelector"] == "kvpool.io/pool=main,kvpool.io/pool-namespace=infer"
            assert 60 <= int(kubernetes.watches[0]["timeoutSeconds"]) <= 120
            assert kubernetes.lists == 1
            assert follower.addresses == ["10.0.0.1:8000"]

    asyncio.run(run())


def test_forgotten_history_is_listed_anew_and_what_went_meanwhile_is_gone(
    kubernetes: FakeKubernetes, tmp_path: Path
) -> None:
    for name, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
        kubernetes.put_pod(pod(name, ip=ip))

    async def run() -> None:
        async with following(tmp_path, "*\n") as follower:
            await until(lambda: kubernetes.watching == 1)
            kubernetes.lose_pod("chat", "a")
            kubernetes.end_watches()
            await until(lambda: follower.addresses == ["10.0.0.2:8000"])
            assert kubernetes.lists == 2
            assert follower.failing() == 0

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["down", "forbidden", "garbage"])
def test_what_is_known_stays_while_the_api_server_misbehaves(
    kubernetes: FakeKubernetes, tmp_path: Path, fault: str
) -> None:
    kubernetes.put_pod(pod("a"))

    async def run() -> None:
        async with following(tmp_path, "*\n") as follower:
            await until(lambda: kubernetes.watching == 1)
            kubernetes.down = fault == "down"
            kubernetes.refuse_with = 403 if fault == "forbidden" else 500 if fault == "garbage" else 0
            if fault == "garbage":
                kubernetes.send_raw(b"neither an event nor JSON\n")
            kubernetes.end_watches()
            await until(lambda: follower.failing() == 1)
            assert follower.addresses == ["10.0.0.1:8000"]
            kubernetes.down, kubernetes.refuse_with = False, 0
            kubernetes.put_pod(pod("b", ip="10.0.0.2"))
            await until(lambda: follower.addresses == ["10.0.0.1:8000", "10.0.0.2:8000"])
            assert follower.failing() == 0

    asyncio.run(run())


def test_namespaces_that_are_allowed_no_more_are_left_at_once(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    kubernetes.put_pod(pod("a"))
    kubernetes.put_pod(pod("b", namespace="other", ip="10.0.0.2"))
    kubernetes.put_pod(pod("agent", namespace="infer", role="agent", ip="10.0.0.9"))

    async def run() -> None:
        async with following(tmp_path, "chat\nother\n") as follower:
            await until(lambda: follower.addresses == ["10.0.0.1:8000", "10.0.0.2:8000"])
            follower.file.write_text("chat\n")
            await until(lambda: follower.addresses == ["10.0.0.1:8000"])
            await until(lambda: kubernetes.watching == 2)
            follower.file.write_text("*\n")
            await until(lambda: follower.addresses == ["10.0.0.1:8000", "10.0.0.2:8000"])
            await until(lambda: kubernetes.watching == 1)
            assert follower.members is not None
            assert len(follower.members.agents) == 1

    asyncio.run(run())


def test_one_namespace_that_is_refused_does_not_hold_the_others_up(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    kubernetes.put_pod(pod("a"))
    kubernetes.forbidden.add("secret")

    async def run() -> None:
        async with following(tmp_path, "chat\nsecret\n") as follower:
            await until(lambda: follower.addresses == ["10.0.0.1:8000"])
            await until(lambda: follower.failing() == 1)  # until the other one was listed, both

    asyncio.run(run())


def test_long_lists_are_read_page_by_page(
    kubernetes: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_watch, "LIST_LIMIT", 2)
    for number in range(5):
        kubernetes.put_pod(pod(f"p{number}", ip=f"10.0.0.{number + 1}"))

    async def run() -> None:
        async with following(tmp_path, "*\n") as follower:
            await until(lambda: len(follower.addresses or []) == 5)
            assert kubernetes.lists == 3

    asyncio.run(run())
