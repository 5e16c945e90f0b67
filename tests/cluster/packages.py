"""What the test cluster takes from Debian: container runtime, network plugins, image tools.

Invariant: packages are installed only, never changed or removed. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.harness.provision_cache import ProvisionError, say
from tests.harness.provision_commands import run_logged

PACKAGES = (
    "buildah",
    "conntrack",
    "containerd",
    "containernetworking-plugins",
    "iproute2",
    "iptables",
    "kmod",
    "mmdebstrap",
    "nftables",
    "procps",
    "runc",
    "socat",
)


def install_packages(logs: Path, environment: dict[str, str]) -> None:
    """Install what is missing."""
    if not (missing := _missing()):
        say("cluster packages: ready (installed)")
        return
    if os.geteuid() != 0:
        raise ProvisionError(f"the test cluster needs root, and the Debian packages {' '.join(missing)}")
    say(f"cluster packages: installing {' '.join(missing)}")
    log = logs / "provision-cluster-packages.log"
    environment = environment | {"DEBIAN_FRONTEND": "noninteractive"}
    wait = ["-o", "DPkg::Lock::Timeout=300"]
    run_logged(
        ["apt-get", *wait, "update"],
        log=log,
        environment=environment,
        what="apt-get update",
        remedy="Are Debian's packages reached?",
    )
    run_logged(
        ["apt-get", *wait, "install", "--yes", "--no-install-recommends", *missing],
        log=log,
        environment=environment,
        what="installing Debian packages",
    )
    say("cluster packages: ready")


def _missing() -> list[str]:
    if shutil.which("dpkg-query") is None:
        raise ProvisionError("the test cluster takes its container runtime from Debian's packages: this is no Debian")
    asked = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *PACKAGES],
        capture_output=True,
        text=True,
        check=False,  # fails when one was never heard of
        stdin=subprocess.DEVNULL,
    )
    installed = {line.split()[0] for line in asked.stdout.splitlines() if line.endswith(" installed")}
    return [name for name in PACKAGES if name not in installed]
