"""The cluster and the installed operator, shared by the tests; each test has namespaces of its own.

`test_cluster_down` ends the cluster: it runs last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.client_pod import open_client
from tests.cluster.cluster import Cluster, is_foreign
from tests.cluster.installation import delete_namespace, ensure_namespace, helm_install
from tests.harness.pod_transport import PodTransport

CLIENTS = "kvpool-test-clients"
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What ends the cluster comes last; what needs the nodes' processes says so on a cluster that is not ours."""
    items.sort(key=lambda item: item.path.name == "test_cluster_down.py")
    if is_foreign():
        for item in items:
            if item.get_closest_marker("local") is not None:
                item.add_marker(pytest.mark.skip(reason="KVPOOL_KUBECONFIG is set: the nodes' processes are not ours"))


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Up, with the images of this checkout."""
    return Cluster.ensure()


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Cluster:
    """The cluster with the operator of this checkout."""
    helm_install(cluster)
    return cluster


@pytest.fixture
def make_namespace(cluster: Cluster) -> Iterator[Callable[..., str]]:
    """Makes namespaces; they are deleted after the test."""
    made: list[str] = []

    def make(purpose: str, **labels: str) -> str:
        name = f"test-{purpose}-{next(_numbers)}"
        delete_namespace(cluster, name)
        ensure_namespace(cluster, name, labels)
        made.append(name)
        return name

    yield make
    for name in made:
        cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[PodTransport]:
    """Sends requests from inside. Not for the session: no program of the tests may outlive the cluster."""
    ensure_namespace(cluster, CLIENTS)
    transport = open_client(cluster, CLIENTS)
    yield transport
    transport.close()
