"""The cluster's cgroups: one tree of the same name in every hierarchy.

Invariant: every process of the cluster lives in this tree from its first instruction on (programs in `system`, containers below
their node), so that killing what is in the tree ends the cluster, whatever became of the records.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from tests.cluster.errors import ClusterError
from tests.cluster.layout import NAME

_ROOT = Path("/sys/fs/cgroup")
_SYSTEM = f"{NAME}/system"
END_SECONDS = 20.0
REAP_SECONDS = 5.0


def hierarchies() -> list[Path]:
    """Where cgroups are made: one folder with cgroup v2, one for each hierarchy with v1 (and runc uses a v2 beside them)."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [Path(fields[1]) for fields in mounts if fields[2] in ("cgroup", "cgroup2")]


def make(*names: str) -> None:
    """Make the tree with a cgroup for each name (nodes), and the one for programs."""
    for root in hierarchies():
        for name in (_SYSTEM, *(f"{NAME}/{name}" for name in names)):
            (root / name).mkdir(parents=True, exist_ok=True)
    if hierarchies() == [_ROOT]:
        controllers = (_ROOT / "cgroup.controllers").read_text().split()
        for folder in (_ROOT, _ROOT / NAME, *(_ROOT / NAME / name for name in names)):
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))


def system_procs() -> Path:
    """The file into which a program of the cluster writes its pid before it becomes that program.

    With cgroup v1 a hierarchy that schedules nothing: the programs shall not share the pods' part of the processors.
    """
    known = hierarchies()
    quiet = [root for root in known if root.name in ("pids", "freezer", "systemd")]
    return (quiet or known)[0] / _SYSTEM / "cgroup.procs"


def pids() -> set[int]:
    """Every process in the tree."""
    return {int(pid) for path in _trees("cgroup.procs") for pid in _lines(path)}


def kill_all() -> None:
    """SIGKILL everything in the tree until nothing is left: programs first, which would start others again."""
    end = time.monotonic() + END_SECONDS
    killed = {int(pid) for path in _trees("cgroup.procs") if path.parent.name == "system" for pid in _lines(path)}
    _kill(killed)
    while left := pids():
        if time.monotonic() > end:
            raise ClusterError(f"processes do not end within {END_SECONDS:g} s of a SIGKILL: {sorted(left)}")
        _kill(left)
        killed |= left
        time.sleep(0.02)
    _wait_reaped(killed)


def remove() -> None:
    """Remove the tree, which has no processes any more."""
    end = time.monotonic() + END_SECONDS
    while folders := [root / NAME for root in hierarchies() if (root / NAME).exists()]:
        for folder in folders:
            for found in sorted(folder.rglob("*"), key=lambda path: len(path.parts), reverse=True):
                if found.is_dir():
                    with contextlib.suppress(OSError):
                        found.rmdir()
            with contextlib.suppress(OSError):
                folder.rmdir()
        if time.monotonic() > end:
            raise ClusterError(f"cgroups stay busy for {END_SECONDS:g} s after their processes ended: {folders}")


def _trees(file: str) -> list[Path]:
    return [path for root in hierarchies() if (root / NAME).exists() for path in (root / NAME).rglob(file)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # the cgroup went meanwhile
        return []


def _wait_reaped(killed: set[int]) -> None:
    """Until they are gone from the process table, too. Who reaps them is not ours to hurry: after a while they may stay."""
    end = time.monotonic() + REAP_SECONDS
    while killed and time.monotonic() < end:
        for pid in killed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # a child of this very process, if it brought the cluster up
        killed = {pid for pid in killed if Path(f"/proc/{pid}").exists()}
        time.sleep(0.05)


def _kill(found: Iterable[int]) -> None:
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
