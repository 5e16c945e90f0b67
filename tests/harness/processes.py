"""Programs that tests and demo start: logged, recorded, ended as whole process groups.

All stay in the session of their starter: the kernel shares processors out among sessions first, so that in sessions of
their own a niceness would mean nothing between them.

Invariant: a program is recorded with its start time before anybody uses it, so that a killed run can be cleaned by
`clean_killed_run` without ever hitting a process that is not ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.harness.valkey_cluster import start_time

RECORD = "programs.json"
END_SECONDS = 10.0


class ProgramError(RuntimeError):
    """A program ended or did not get ready; the message quotes the end of its log."""


class Program:
    """One program in a process group of its own. `folder` receives its log and the record of what is running.

    niceness: 0 to 19; an engine that spins on every core must not keep small programs beside it from running.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        env: Mapping[str, str] | None = None,
        niceness: int = 0,
    ) -> None:
        self.name = name
        self.folder = folder
        self.log = folder / f"{name}.log"
        self._arguments = ["nice", "-n", str(niceness), *arguments] if niceness else list(arguments)
        self._env = {**os.environ, **(env or {})}
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)  # an engine imports for 15 s, without bytecode for longer
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Pid of the program's first process, which leads its group."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    def start(self) -> None:
        """Start it; its output is appended to the log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, process_group=0
            )
        _record(self.folder, self._process.pid)

    def is_running(self) -> bool:
        """Whether the first process is there."""
        return self._process is not None and self._process.poll() is None

    def wait_until(self, ready: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Poll until `ready()`; ProgramError when the program ends first or the time is over."""
        end = time.monotonic() + seconds
        while not ready():
            if not self.is_running():
                raise ProgramError(f"{self.name} ended while waiting for {what}:\n{self.tail()}")
            if time.monotonic() > end:
                raise ProgramError(f"{self.name}: no {what} within {seconds:g} s:\n{self.tail()}")
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the group and reap it."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after a while."""
        if self._process is None:
            return
        self.signal(signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()

    def tail(self, lines: int = 25) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def log_text(self) -> str:
        """The whole log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _record(folder: Path, pid: int) -> None:
    path = folder / RECORD
    known = json.loads(path.read_text()) if path.exists() else {}
    known[str(pid)] = start_time(pid)
    path.write_text(json.dumps(known))


def clean_killed_run(folder: Path) -> list[str]:
    """Kill the groups that earlier runs recorded below `folder` and left running; returns their command lines."""
    ended = []
    for path in folder.rglob(RECORD):
        for pid, started in json.loads(path.read_text()).items():
            if started is not None and start_time(int(pid)) == started:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(pid), signal.SIGKILL)
                    ended.append(command)
        path.unlink()
    return ended
