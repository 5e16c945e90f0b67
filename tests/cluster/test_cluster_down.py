"""`make cluster-down` leaves the machine as it was: after a whole cluster, a killed one, half a one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import cgroups, owner
from tests.cluster.cluster import is_foreign
from tests.cluster.errors import ClusterError
from tests.cluster.leftovers import Machine, snapshot
from tests.cluster.local import LocalCluster
from tests.harness.provision import ROOT

pytestmark = pytest.mark.skipif(is_foreign(), reason="KVPOOL_KUBECONFIG is set: that cluster is not ours to end")


WARM_SECONDS = 60


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
