"""`python -m tests.cluster up | down [--purge] | status | kubectl ... | helm ...`: what `make cluster-up` and the demo call."""

from __future__ import annotations

import argparse
import os
import sys

from tests.cluster import owner
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.local import LocalCluster
from tests.cluster.say import say
from tests.harness.provision_cache import ProvisionError


def main(arguments: list[str]) -> int:
    """Do one thing, and say in one line what went wrong."""
    try:
        if arguments[:1] in (["kubectl"], ["helm"]):
            return _run_client(arguments)
        return _manage(arguments)
    except (ClusterError, ProvisionError) as error:
        say(f"FAILED: {error}")
        return 1


def _manage(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("action", choices=["up", "down", "status"])
    parser.add_argument("--purge", action="store_true", help="down: forget what was in the cluster, too")
    options = parser.parse_args(arguments)
    if options.action == "up":
        Cluster.ensure()
    elif options.action == "down":
        LocalCluster().down(purge=options.purge)
    else:
        return _status()
    return 0


def _status() -> int:
    local = LocalCluster()
    for name, process in sorted(local.processes.known().items()):
        print(f"{name:24} {process.pid if process.is_alive() else 'dead'}")
    found = owner.current()
    up = local.is_up()
    print("up" if up else f"not up{f' ({found.clone} owns what is there)' if found is not None else ''}")
    return 0 if up else 1


def _run_client(arguments: list[str]) -> int:
    local = LocalCluster()
    os.environ["KUBECONFIG"] = str(local.kubeconfig)
    os.execv(local.programs / arguments[0], arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
