"""The cluster's long-running programs: started, recorded, found again by a later command, ended.

Invariant: a program is known by its pid and kernel start time together, so that no foreign process is ever hit. It records both
itself, before it becomes that program: whoever started it may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import cgroups
from tests.cluster.errors import ClusterError

_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/"}
"""Not ours: a proxy or a GOFLAGS of the user's must not reach the cluster."""
_LAST_LINES = 12
_LINE_CHARACTERS = 300
_JOIN = 'echo $$ > "$0" && read -r stat < /proc/$$/stat && echo "$stat" > "$1.new" && mv "$1.new" "$1" && shift && exec "$@"'
"""Arguments: the file of its cgroup, its record, the program."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process, for good."""

    pid: int
    started: int

    def is_alive(self) -> bool:
        """Whether it runs; one that ended and waits to be reaped does not."""
        return process_of(self.pid) == self and _runs(self.pid)

    def kill(self, number: int = signal.SIGKILL, *, wait: bool = True) -> None:
        """Signal it if it is still there; wait until it is gone if asked."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        if wait:
            wait_until(lambda: not self.is_alive(), seconds=20, what=f"the end of process {self.pid}")
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)  # it may be a child of this very process


class Processes:
    """What runs, by name; a file for each."""

    def __init__(self, folder: Path) -> None:
        self._records = folder / "processes"
        self._logs = folder / "logs"

    def get(self, name: str) -> Process | None:
        """The program of that name if it is alive."""
        found = _parse(self._records / name)
        return found if found is not None and found.is_alive() else None

    def known(self) -> dict[str, Process]:
        """All that were started, alive or not."""
        names = [path.name for path in self._records.iterdir()] if self._records.exists() else []
        found = {name: _parse(self._records / name) for name in names if not name.endswith(".new")}
        return {name: process for name, process in found.items() if process is not None}

    def alive(self) -> dict[str, Process]:
        """All that are alive."""
        return {name: process for name, process in self.known().items() if process.is_alive()}

    def ensure(self, name: str, command: Sequence[str | Path]) -> Process:
        """Start it unless it runs."""
        return self.get(name) or self._start(name, command)

    def forget(self) -> None:
        """Nothing runs any more."""
        shutil.rmtree(self._records, ignore_errors=True)

    def _end_of_log(self, name: str) -> str:
        log = self._log(name)
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if log.exists() else []
        return "\n    ".join([f"{log} ends:", *(line[:_LINE_CHARACTERS] for line in lines)])

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def wait_for(self, ready: Callable[[], bool], *names: str, seconds: float, what: str) -> None:
        """Wait for something that some programs shall do; none of them must end meanwhile."""

        def check() -> bool:
            if ready():
                return True
            for name in names:
                if self.get(name) is None:
                    raise ClusterError(f"{name} ended while {what} was waited for. {self._end_of_log(name)}")
            return False

        try:
            wait_until(check, seconds=seconds, what=what)
        except TimeoutError as error:
            raise ClusterError(f"{error}. {self._end_of_log(names[-1])}") from error

    def _start(self, name: str, command: Sequence[str | Path]) -> Process:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._records.mkdir(exist_ok=True)
        record = self._records / name
        record.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", _JOIN, str(cgroups.system_procs()), str(record), *map(str, command)],
            _ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self._log(name)), flags, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        wait_until(lambda: record.exists() or not _runs(pid), seconds=20, what=f"the record of {name}")
        process = self.get(name)
        if process is None:
            raise ClusterError(f"{name} ended at once. {self._end_of_log(name)}")
        return process


def process_of(pid: int) -> Process | None:
    """The process that has this pid now."""
    return _parse(Path(f"/proc/{pid}/stat"))


def wait_until(ready: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Poll; TimeoutError that says what when the time is over."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def _parse(file: Path) -> Process | None:
    """Whom the text of a /proc/PID/stat names."""
    try:
        text = file.read_text()
    except OSError:
        return None
    return Process(int(text.split(None, 1)[0]), int(_fields(text)[19]))


def _runs(pid: int) -> bool:
    """Whether there is a process of this pid that did not end."""
    try:
        return _fields(Path(f"/proc/{pid}/stat").read_text())[0] not in "ZX"
    except OSError:
        return False


def _fields(stat: str) -> list[str]:
    """From the state on: 0 is the state, 19 the start time."""
    return stat.rsplit(")", 1)[1].split()
