"""The cluster's long-running programs: started, recorded, found again by a later command, ended.

Invariant: a program is known by its pid and kernel start time together, so that no foreign process is ever hit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
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
_JOIN = 'echo $$ > "$0" && exec "$@"'


@dataclass(frozen=True, slots=True)
class Process:
    """One process, for good."""

    pid: int
    started: int

    def is_alive(self) -> bool:
        """Whether it runs; one that ended and waits to be reaped does not."""
        found = _stat(self.pid)
        return found is not None and found[0] not in "ZX" and int(found[19]) == self.started

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
    """What runs, by name; on disk in one file."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "processes.json"
        self._logs = folder / "logs"
        self._lock = threading.Lock()

    def get(self, name: str) -> Process | None:
        """The program of that name if it is alive."""
        known = self._read().get(name)
        return known if known is not None and known.is_alive() else None

    def alive(self) -> dict[str, Process]:
        """All that are alive."""
        return {name: process for name, process in self._read().items() if process.is_alive()}

    def known(self) -> dict[str, Process]:
        """All that were started, alive or not."""
        return self._read()

    def ensure(self, name: str, command: Sequence[str | Path]) -> Process:
        """Start it unless it runs."""
        return self.get(name) or self._start(name, command)

    def forget(self) -> None:
        """Nothing runs any more."""
        self._file.unlink(missing_ok=True)

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
        log = str(self._log(name))
        arguments = ["sh", "-c", _JOIN, str(cgroups.system_procs()), *map(str, command)]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        pid = os.posix_spawn(
            "/bin/sh",
            arguments,
            _ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        process = process_of(pid)
        if process is None:
            raise ClusterError(f"{name} ended at once. {self._end_of_log(name)}")
        with self._lock:
            self._write(self._read() | {name: process})
        return process

    def _read(self) -> dict[str, Process]:
        if not self._file.exists():
            return {}
        return {name: Process(**fields) for name, fields in json.loads(self._file.read_text()).items()}

    def _write(self, known: dict[str, Process]) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(
            json.dumps({name: {"pid": p.pid, "started": p.started} for name, p in known.items()}, indent=1)
        )
        fresh.rename(self._file)


def process_of(pid: int) -> Process | None:
    """The process that has this pid now."""
    found = _stat(pid)
    return Process(pid, int(found[19])) if found is not None else None


def wait_until(ready: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Poll; TimeoutError that says what when the time is over."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on: 0 is the state, 19 the start time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
