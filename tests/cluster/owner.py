"""Whose cluster is on this machine: one lock, one record, both in a folder of /run that exists while a cluster does.

Invariant: what starts or ends processes, namespaces or cgroups holds the lock; the record is written before the first of them
is made and removed after the last is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster import cgroups, network
from tests.cluster.errors import ClusterError
from tests.cluster.layout import NAME
from tests.cluster.processes import Processes
from tests.cluster.say import say

_FOLDER = Path("/run") / NAME
_RECORD = _FOLDER / "owner.json"
_LOCK = _FOLDER / "lock"
CORE = ("etcd", "kube-apiserver")
"""A cluster without one of these is dead."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The clone that a cluster belongs to."""

    clone: str
    state: str
    version: str
    """What its programs and their configuration were made from."""

    def is_live(self) -> bool:
        """Whether the cluster runs and somebody can still say `make cluster-down` to it."""
        processes = Processes(Path(self.state))
        return Path(self.clone).is_dir() and all(processes.get(name) is not None for name in CORE)


def current() -> Owner | None:
    """Whose cluster is or was up on this machine."""
    try:
        return Owner(**json.loads(_RECORD.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Nobody else brings a cluster up or down on this machine meanwhile."""
    lock = _acquire()
    try:
        yield
    finally:
        if not _RECORD.exists():
            shutil.rmtree(_FOLDER, ignore_errors=True)  # whoever waits for the lock sees that it is another one now
        os.close(lock)


def refuse_foreign(clone: Path) -> None:
    """ClusterError when another clone's cluster is live."""
    owner = current()
    if owner is not None and owner.clone != str(clone) and owner.is_live():
        raise ClusterError(
            f"a test cluster of {owner.clone} is up, and this machine has room for one: "
            f"end it with `make -C {owner.clone} cluster-down`, or set KVPOOL_KUBECONFIG"
        )


def take(owner: Owner) -> None:
    """Record whose cluster is going to be made."""
    _RECORD.write_text(json.dumps(asdict(owner), indent=1))


def clean() -> None:
    """End whatever cluster there is, whole or in pieces, of this clone or a dead one."""
    network.disconnect()
    cgroups.kill_all()
    cgroups.remove()
    if (owner := current()) is not None:
        Processes(Path(owner.state)).forget()
    forget()


def forget() -> None:
    """Remove the record."""
    _RECORD.unlink(missing_ok=True)


def _acquire() -> int:
    while True:
        _FOLDER.mkdir(mode=0o755, exist_ok=True)
        try:
            lock = os.open(_LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        except FileNotFoundError:  # removed between the two lines
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another command that brings a cluster up or down")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if _LOCK.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        os.close(lock)
