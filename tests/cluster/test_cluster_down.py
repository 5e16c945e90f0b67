"""`make cluster-down` leaves the machine as it was: after a whole cluster, a killed one, half a one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import cgroups, owner
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.images import pause_reference
from tests.cluster.installation import ensure_namespace, helm_install, pool_manifest, wait_pool_ready
from tests.cluster.leftovers import Machine, snapshot
from tests.cluster.local import LocalCluster
from tests.cluster.processes import Processes
from tests.cluster.workloads import Runtime, plain_deployment
from tests.harness.provision import ROOT

pytestmark = pytest.mark.local
WARM_SECONDS = 60
NAMESPACE = "test-down"
VALKEY = {"managed": {"shards": 1, "memoryPerShard": "128Mi"}}


@pytest.fixture
def local() -> Iterator[LocalCluster]:
    local = LocalCluster()
    local.down()
    yield local
    local.down()


@pytest.fixture
def before(local: LocalCluster) -> Machine:
    """The machine without a cluster."""
    return snapshot()


def assert_as_before(before: Machine) -> None:
    assert snapshot().added_since(before) == {}
    assert before.added_since(snapshot()) == {}


def test_down_leaves_no_process_mount_namespace_cgroup_or_file_in_run(before: Machine, local: LocalCluster) -> None:
    local.up()
    started = time.monotonic()
    local.down()
    local.up()
    assert time.monotonic() - started < WARM_SECONDS
    assert local.is_up()
    local.kubectl("get", "nodes")

    local.down()

    assert_as_before(before)


def test_a_cluster_whose_processes_were_all_killed_comes_up_again_and_goes(
    before: Machine, local: LocalCluster
) -> None:
    local.up()
    another = Path("/somewhere/else")
    with pytest.raises(ClusterError, match=f"a test cluster of {ROOT} is up"):
        owner.refuse_foreign(another)

    cgroups.kill_all()

    assert not local.is_up()
    owner.refuse_foreign(another)  # nobody's any more: whoever comes may clean it

    local.up()

    assert local.is_up()
    local.down()
    assert_as_before(before)


@pytest.mark.parametrize("seconds", [0.6, 2.0, 5.0])
def test_an_up_that_was_cut_off_is_gone_on_with(seconds: float, before: Machine, local: LocalCluster) -> None:
    with subprocess.Popen([sys.executable, "-m", "tests.cluster", "up"], cwd=ROOT) as cut_off:
        time.sleep(seconds)  # anywhere: every place must do
        cut_off.kill()

    local.up()

    assert local.is_up()
    local.down()
    assert_as_before(before)


def test_demo_down_leaves_nothing_of_a_pool_and_an_engine(before: Machine) -> None:
    """Arenas, sockets on the nodes, containers of several users: as the demo leaves them."""
    cluster = Cluster.ensure()
    helm_install(cluster)
    ensure_namespace(cluster, NAMESPACE)
    cluster.apply(pool_manifest("chat", NAMESPACE, capacity="64Mi", valkey=VALKEY))
    wait_pool_ready(cluster, "chat", NAMESPACE)
    runtime = Runtime(cluster.image("engine"), str(cluster.engine_python), tuple(map(str, cluster.engine_mounts)))
    engine = plain_deployment(
        "llama",
        runtime,
        model=cluster.model("tiny-llama"),
        node=cluster.nodes[0],
        labels={"kvpool.io/inject": "true"},
        annotations={"kvpool.io/pool": "chat"},
    )
    for manifest in engine:
        manifest["metadata"]["namespace"] = NAMESPACE
    cluster.apply(*engine)
    cluster.kubectl("rollout", "status", "deployment/llama", f"--namespace={NAMESPACE}", "--timeout=300s", seconds=310)
    (pod,) = cluster.get("pods", f"--namespace={NAMESPACE}", "--selector=app=llama")["items"]
    assert "kvpool.io/injected" in pod["metadata"]["annotations"]

    subprocess.run(["make", "demo-down"], cwd=ROOT, check=True, timeout=120)

    assert_as_before(before)


@pytest.fixture
def clone(local: LocalCluster, tmp_path: Path) -> Iterator[Path]:
    """Of this repository, as its tests are here, committed or not; its cluster ends with the test, however that went."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    shutil.copytree(ROOT / "tests", clone / "tests", dirs_exist_ok=True)
    yield clone
    run_in(clone, "down")


def run_in(clone: Path, *arguments: str) -> None:
    """`python -m tests.cluster` of a clone."""
    command = [sys.executable, "-m", "tests.cluster", *arguments]
    subprocess.run(command, cwd=clone, env={**os.environ, "PYTHONPATH": ""}, check=True, timeout=600)


def test_a_killed_cluster_of_another_clone_is_cleaned(before: Machine, local: LocalCluster, clone: Path) -> None:
    run_in(clone, "up")
    run_in(clone, "kubectl", "run", "idle", f"--image={pause_reference()}", "--image-pull-policy=IfNotPresent")
    run_in(clone, "kubectl", "wait", "--for=condition=Ready", "pod/idle", "--timeout=60s")
    with pytest.raises(ClusterError, match=f"a test cluster of {clone} is up"):
        local.up()
    theirs = owner.current()
    assert theirs is not None
    for process in Processes(Path(theirs.state)).alive().values():
        process.kill()  # the pod goes on without a kubelet, as after an out-of-memory kill
    assert cgroups.pids()

    local.up()

    assert local.is_up()
    assert (found := owner.current()) is not None
    assert found.clone == str(ROOT)
    local.down()
    assert_as_before(before)


def _kill(local: LocalCluster, *names: str) -> None:
    for name in names:
        process = local.processes.get(name)
        assert process is not None
        process.kill()


BREAKS: dict[str, Callable[[LocalCluster], None]] = {
    "no control plane": lambda local: _kill(local, *owner.CORE),
    "a node's namespaces are not held": lambda local: _kill(local, "anchor-node-b"),
    "no record": lambda _: owner.forget(),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_cluster_goes_without_a_trace(broken: str, before: Machine, local: LocalCluster) -> None:
    local.up()
    BREAKS[broken](local)

    local.down()

    assert_as_before(before)
