"""The chart's pre-delete hook against an API server in a few lines: it releases every pool, and always ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvpool_core.errors import KVPoolError
from kvpool_operator.names import FINALIZER
from kvpool_operator.pre_delete import STOP_SECONDS, TOTAL_SECONDS, Clock, HeldPool, Operator, release_pools

OPERATOR = Operator("kvpool-system", "kvpool-operator", "app.kubernetes.io/component=operator")
OTHERS = "example.com/other"


def pool(name: str, *finalizers: str) -> HeldPool:
    """A pool with finalizers."""
    return HeldPool("inference", name, finalizers, resource_version="1")


@dataclass(slots=True)
class FakeTime:
    """Time that passes by sleeping only."""

    seconds: float = 0.0

    def clock(self) -> Clock:
        """What the hook sees of it."""
        return Clock(now=lambda: self.seconds, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass(slots=True)
class FakeCluster:
    """Deployment, pods and pools; `tick` is called at each look at the pods."""

    pools: list[HeldPool] = field(default_factory=list)
    deployed: bool = True
    pods: int = 0
    replicas: int = 2
    refusals: int = 0
    tick: Callable[[FakeCluster], None] | None = None
    calls: list[str] = field(default_factory=list)

    def scale_to_zero(self, namespace: str, deployment: str) -> bool:
        assert (namespace, deployment) == (OPERATOR.namespace, OPERATOR.deployment)
        self.calls.append("scale")
        self.replicas = 0
        return self.deployed

    def count_pods(self, namespace: str, selector: str) -> int:
        assert (namespace, selector) == (OPERATOR.namespace, OPERATOR.selector)
        if self.tick is not None:
            self.tick(self)
        return self.pods

    def list_pools(self) -> Sequence[HeldPool]:
        self.calls.append("list")
        return list(self.pools)

    def set_finalizers(self, pool: HeldPool, finalizers: Sequence[str]) -> None:
        self.calls.append("release")
        if self.refusals:
            self.refusals -= 1
            raise KVPoolError("the object has been modified")
        self.pools = [
            replace(each, finalizers=tuple(finalizers), resource_version="2") if each.name == pool.name else each
            for each in self.pools
        ]


def test_the_operator_is_gone_before_a_finalizer_is_touched() -> None:
    def one_pod_less(cluster: FakeCluster) -> None:
        assert "release" not in cluster.calls
        cluster.pods -= 1

    cluster = FakeCluster([pool("chat", FINALIZER)], pods=3, tick=one_pod_less)

    assert release_pools(cluster, OPERATOR, FakeTime().clock()) == ""

    assert cluster.replicas == 0
    assert cluster.pools[0].finalizers == ()


def test_only_our_finalizer_goes_and_pools_without_it_are_left_alone() -> None:
    cluster = FakeCluster([pool("chat", OTHERS, FINALIZER), pool("docs", OTHERS), pool("code")])

    assert release_pools(cluster, OPERATOR, FakeTime().clock()) == ""

    assert [each.finalizers for each in cluster.pools] == [(OTHERS,), (OTHERS,), ()]
    assert cluster.calls.count("release") == 1


def test_a_pool_that_changed_meanwhile_is_tried_again() -> None:
    cluster = FakeCluster([pool("chat", FINALIZER), pool("docs", FINALIZER)], refusals=3)

    assert release_pools(cluster, OPERATOR, FakeTime().clock()) == ""

    assert [each.finalizers for each in cluster.pools] == [(), ()]


def test_nothing_there_is_nothing_to_do() -> None:
    time = FakeTime()

    assert release_pools(FakeCluster(deployed=False), OPERATOR, time.clock()) == ""

    assert time.seconds == 0


def test_a_pod_that_never_goes_does_not_hold_the_pools() -> None:
    time = FakeTime()
    cluster = FakeCluster([pool("chat", FINALIZER)], pods=1)

    assert release_pools(cluster, OPERATOR, time.clock()) == ""

    assert cluster.pools[0].finalizers == ()
    assert STOP_SECONDS <= time.seconds < STOP_SECONDS + 5


def test_it_ends_and_says_what_is_left_when_the_api_server_refuses() -> None:
    time = FakeTime()
    cluster = FakeCluster([pool("chat", FINALIZER)], refusals=10**6)

    left = release_pools(cluster, OPERATOR, time.clock())

    assert "KVCachePool inference/chat" in left
    assert "modified" in left
    assert time.seconds <= TOTAL_SECONDS + 5


def test_it_ends_when_the_api_server_is_away() -> None:
    def away(cluster: FakeCluster) -> None:
        raise KVPoolError("no answer")

    time = FakeTime()
    cluster = FakeCluster([pool("chat", FINALIZER)], tick=away)

    assert release_pools(cluster, OPERATOR, time.clock()) == ""

    assert time.seconds <= TOTAL_SECONDS


@pytest.mark.parametrize("finalizers", [(FINALIZER,), (OTHERS, FINALIZER)])
def test_a_released_pool_is_looked_at_once_more(finalizers: tuple[str, ...]) -> None:
    cluster = FakeCluster([pool("chat", *finalizers)])

    release_pools(cluster, OPERATOR, FakeTime().clock())

    assert cluster.calls[-1] == "list"


class Scripted(BaseHTTPRequestHandler):
    """An API server with one pool that is held, a Deployment and no pods."""

    pools: ClassVar[list[dict[str, Any]]] = []
    requests: ClassVar[list[tuple[str, str, Any]]] = []

    def do_GET(self) -> None:
        self._answer(None)

    def do_PATCH(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""

    def _answer(self, body: Any) -> None:
        path = self.path.partition("?")[0]
        self.requests.append((self.command, path, body))
        answers = {
            "/apis/kvpool.io/v1alpha1/kvcachepools": {"items": self.pools},
            "/api/v1/namespaces/kvpool-system/pods": {"items": []},
        }
        if path.endswith("/kvcachepools/chat"):
            self.pools[0]["metadata"]["finalizers"] = body["metadata"]["finalizers"]
        data = json.dumps(answers.get(path, {})).encode()
        is_missing = path.endswith("/deployments/kvpool-operator") or (not self.pools and "kvpool.io" in path)
        self.send_response(404 if is_missing else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def api_server(tmp_path: Path) -> Iterator[type[Scripted]]:
    """A server on loopback, and a kubeconfig that names it."""
    Scripted.pools, Scripted.requests = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    thread = threading.Thread(target=server.serve_forever, name="api-server")
    thread.start()
    kubeconfig = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
    yield Scripted
    server.shutdown()
    thread.join()
    server.server_close()


def run(folder: Path) -> int:
    """The exit status of the command, as the Job runs it."""
    options = ["--namespace=kvpool-system", "--deployment=kvpool-operator", "--selector=a=b"]
    environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "kvpool_operator.pre_delete", *options]
    return subprocess.run(command, env=environment, timeout=50, check=False).returncode


def test_command_patches_what_it_read_and_nothing_else(api_server: type[Scripted], tmp_path: Path) -> None:
    api_server.pools = [
        {
            "metadata": {
                "namespace": "inference",
                "name": "chat",
                "resourceVersion": "7",
                "finalizers": [OTHERS, FINALIZER],
            }
        }
    ]

    assert run(tmp_path) == 0

    patches = [(path, body) for method, path, body in api_server.requests if method == "PATCH"]
    assert patches == [
        ("/apis/apps/v1/namespaces/kvpool-system/deployments/kvpool-operator", {"spec": {"replicas": 0}}),
        (
            "/apis/kvpool.io/v1alpha1/namespaces/inference/kvcachepools/chat",
            {"metadata": {"resourceVersion": "7", "finalizers": [OTHERS]}},
        ),
    ]


def test_command_ends_well_when_deployment_and_crd_are_missing(api_server: type[Scripted], tmp_path: Path) -> None:
    assert run(tmp_path) == 0

    assert api_server.requests[-1][1] == "/apis/kvpool.io/v1alpha1/kvcachepools"
