"""What has to be there before a cluster can be brought up: programs, Debian packages, the base of the images.

Run by tests/harness/provision.py, whose Python has nothing installed: standard library only.
"""

from __future__ import annotations

from pathlib import Path

from tests.cluster.packages import install_packages
from tests.cluster.programs import clients_entry, make_programs, programs_entry
from tests.cluster.rootfs import make_rootfs, rootfs_entry


def provide_programs(cache: Path, logs: Path, environment: dict[str, str]) -> None:
    """The part that is bound by processors."""
    make_programs(cache, logs, environment)


def provide_debian(cache: Path, logs: Path, environment: dict[str, str]) -> None:
    """The part that is bound by the network."""
    install_packages(logs, environment)
    make_rootfs(cache, logs, environment)


def provided(cache: Path) -> set[Path]:
    """The cache entries that this checkout uses."""
    return {programs_entry(cache), clients_entry(cache), rootfs_entry(cache)}
