"""The tests' end of `engine_fork_server.py`: starts it, and lets it fork programs that look like those of `subprocess`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness.processes import Program, ProgramError

SERVER = Path(__file__).with_name("engine_fork_server.py")
FORK_SECONDS = 240.0
"""The first fork waits for the imports."""


class ForkedProcess:
    """A process that is not our child: ended when its pidfd says so. Its exit status is its parent's: 0 stands for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = True

    def poll(self) -> int | None:
        """None while it runs."""
        try:
            self.wait(0)
        except subprocess.TimeoutExpired:
            return None
        return 0

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; TimeoutExpired after `timeout` seconds."""
        if not self._ended:
            waiter = select.poll()
            waiter.register(self._pidfd, select.POLLIN)
            if not waiter.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            os.close(self._pidfd)
            self._ended = True
        return 0


class EngineForks:
    """One fork server. `environment`: what is read while importing, equal for all engines."""

    def __init__(self, python: Path, *, folder: Path, environment: Mapping[str, str], server: Path = SERVER) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(FORK_SECONDS)
        self._lock = threading.Lock()
        # one thread: OpenMP and BLAS make theirs while they are imported, and a copy would lack them
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.program = Program(
            "engine-forks",
            [str(python), "-P", str(server), str(theirs.fileno())],
            folder=folder,
            env={**environment, **single},
            descriptors=(theirs.fileno(),),
        )
        with theirs:
            self.program.start()

    def fork(self, arguments: Sequence[str], env: Mapping[str, str], log: Path, niceness: int) -> ForkedProcess:
        """An API server of these arguments; it leads a process group of its own."""
        request = {"arguments": list(arguments), "environment": dict(env), "log": str(log), "niceness": niceness}
        with self._lock:
            try:
                self._ours.sendall(json.dumps(request).encode() + b"\n")
                answer = self._ours.recv(1 << 10)
            except OSError as error:
                raise ProgramError(f"the fork server does not answer: {error}\n{self.program.tail()}") from error
        if not answer:
            raise ProgramError(f"the fork server has ended:\n{self.program.tail()}")
        return ForkedProcess(json.loads(answer)["pid"])

    def stop(self) -> None:
        """End it and what it forked; once more is no fault."""
        with contextlib.suppress(OSError):  # closed already
            self._ours.shutdown(socket.SHUT_RDWR)
        self.program.wait_ended()
        self._ours.close()
