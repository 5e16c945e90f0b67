"""What a machine has that a cluster could leave behind: compared before and after.

Invariant: two snapshots with nothing but a command between them are equal.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path

from tests.cluster.cgroups import hierarchies


@dataclass(frozen=True, slots=True)
class Machine:
    """The kinds of things, each as a set of descriptions."""

    processes: frozenset[str]
    """Below this process, or in another network: all that a cluster starts is one of both, what others do here is neither."""
    mounts: frozenset[str]
    network_namespaces: frozenset[str]
    cgroups: frozenset[str]
    """The topmost ones: below those that are not ours, others come and go."""
    links_and_routes: frozenset[str]
    run: frozenset[str]

    def added_since(self, before: Machine) -> dict[str, list[str]]:
        """What is there now and was not then, by kind; kinds without any are left out."""
        added = {
            field.name: sorted(getattr(self, field.name) - getattr(before, field.name)) for field in fields(Machine)
        }
        return {kind: found for kind, found in added.items() if found}


def snapshot() -> Machine:
    """The machine now."""
    running = {int(path.name): parent for path in Path("/proc").iterdir() if (parent := _parent(path.name)) is not None}
    networks = {pid: space for pid in running if (space := _link(f"/proc/{pid}/ns/net")) is not None}
    elsewhere = {pid for pid, space in networks.items() if space != networks[os.getpid()]}
    ours = elsewhere | {pid for pid in running if _descends(pid, running)}
    return Machine(
        processes=frozenset(f"{pid} {_command(pid)}" for pid in ours),
        mounts=frozenset(
            line.split(" ", 3)[2] + " " + line.split()[4]
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ),
        network_namespaces=frozenset(networks.values()),
        cgroups=frozenset(str(path) for root in hierarchies() for path in root.iterdir() if path.is_dir()),
        links_and_routes=frozenset(_lines("ip", "-oneline", "link") | _lines("ip", "route", "show", "table", "all")),
        run=frozenset(str(path) for path in Path("/run").rglob("*")),
    )


def _parent(pid: str) -> int | None:
    """None when it is no process, gone, or dead and not reaped."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if not pid.isdigit() or found[0] in "ZX" else int(found[1])


def _descends(pid: int, parents: dict[int, int]) -> bool:
    """Whether it is below this process."""
    while (parent := parents.get(pid)) is not None:
        if parent == os.getpid():
            return True
        pid = parent
    return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _link(path: str) -> str | None:
    try:
        return str(Path(path).readlink())
    except OSError:
        return None


def _lines(*command: str) -> set[str]:
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
