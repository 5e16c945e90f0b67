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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tests.harness.valkey_cluster import start_time

RECORD = "programs.json"
_recording = threading.Lock()
END_SECONDS = 10.0


class ProgramError(RuntimeError):
    """A program ended or did not get ready; the message quotes the end of its log."""


class Process(Protocol):
    """What is used of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired."""


Starter = Callable[[Sequence[str], Mapping[str, str], Path, int], Process]
"""Starts arguments with an environment, a log to append to and a niceness, in a process group of its own."""


class Program:
    """One program in a process group of its own. `folder` receives its log and the record of what is running.

    niceness: 0 to 19; an engine that spins on every core must not keep small programs beside it from running.
    starter: in place of a new process of `arguments`. descriptors: inherited by it.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        env: Mapping[str, str] | None = None,
        niceness: int = 0,
        starter: Starter | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.folder = folder
        self.log = folder / f"{name}.log"
        self._arguments = list(arguments)
        self._niceness = niceness
        self._starter = starter or self._spawn
        self._descriptors = descriptors
        self._env = {**os.environ, **(env or {})}
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)  # an engine imports for 15 s, without bytecode for longer
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        """Pid of the program's first process, which leads its group."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    def start(self) -> None:
        """Start it; its output is appended to the log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = self._starter(self._arguments, self._env, self.log, self._niceness)
        _record(self.folder, self._process.pid)

    def _spawn(self, arguments: Sequence[str], env: Mapping[str, str], log: Path, niceness: int) -> Process:
        command = ["nice", "-n", str(niceness), *arguments] if niceness else arguments
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                process_group=0,
                pass_fds=self._descriptors,
            )

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
        self.wait_ended()

    def wait_ended(self) -> None:
        """Give it a while to end by itself, then SIGKILL the group."""
        if self._process is not None:
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
    with _recording:
        known = json.loads(path.read_text()) if path.exists() else {}
        known[str(pid)] = start_time(pid)
        path.write_text(json.dumps(known))


def clean_killed_run(folder: Path) -> list[str]:
    """Kill the groups that earlier runs recorded below `folder` and left running; returns their command lines."""
    ended = []
    for path in folder.rglob(RECORD):
        for pid, started in json.loads(path.read_text()).items():
            if started is None or start_time(int(pid)) != started:
                continue
            with contextlib.suppress(OSError):  # it has ended meanwhile
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                os.killpg(int(pid), signal.SIGKILL)
                if command:  # else it is a zombie: ended, but not reaped yet
                    ended.append(command)
        path.unlink()
    return ended
