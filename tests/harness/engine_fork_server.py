"""Forks API servers of engines from one process that has imported them: `python engine_fork_server.py FD`, in the engine's venv.

Importing takes 10 s of a core, for each engine anew. What an engine spawns (core, workers) is a process of its own, as ever.

Invariant: at each fork this process has one thread, so that a copy misses none (thread pools are made by who uses them, after
the fork). It ends, and ends all that it forked, as soon as the other end of FD is closed, however that came.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

IMPORTED = (
    "uvloop",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.engine.async_llm",
)


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each line of JSON {arguments, environment, log, niceness}, answered with a line of JSON {pid}.

    Returns twice: in each copy its request, in this process None when the tests have gone.
    """
    forked: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(forked))
    with connection.makefile("rb") as requests:
        for line in requests:
            request: dict[str, Any] = json.loads(line)
            threads = list(Path("/proc/self/task").iterdir())
            assert len(threads) == 1, f"a copy would lack all but one of {len(threads)} threads"
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setpgid(0, 0)
                return request
            with contextlib.suppress(OSError):  # it has done so itself, or is gone
                os.setpgid(pid, pid)
            forked.add(pid)
            with contextlib.suppress(OSError):  # the tests have gone: no more requests come
                connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in forked:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def become(request: dict[str, Any]) -> None:
    """Look like a process that was started with the request's arguments and environment."""
    os.nice(request["niceness"])
    with open(request["log"], "ab") as log, open(os.devnull, "rb") as nothing:  # noqa: PTH123
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source.fileno(), target)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["api_server", *request["arguments"]]


def _reap(forked: set[int]) -> None:
    """Forget who ended: its pid may come again."""
    for pid in list(forked):
        if os.waitpid(pid, os.WNOHANG)[0]:
            forked.discard(pid)


def main() -> None:
    """Import, serve, and in a copy be an API server."""
    for name in IMPORTED:
        __import__(name)
    from vllm.entrypoints.launchers.api_server import entry

    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request = serve(connection)
    if request is not None:
        become(request)
        entry.main()


if __name__ == "__main__":
    main()
