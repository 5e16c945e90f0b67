"""Requests from inside the cluster: through pods, Services and cluster DNS, as a client of the pool sends them.

Invariant: an answer belongs to the request whose number it carries; when the session to the pod breaks, every open
request ends with a ConnectionError.
"""

from __future__ import annotations

import base64
import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness.web import TIMEOUT_SECONDS, Reply, Streamed

HERE = Path(__file__).resolve().parent
GRACE_SECONDS = 10.0
"""On top of a request's own time, for the session to the pod."""
_ERRORS: dict[str, type[Exception]] = {
    "ConnectionRefusedError": ConnectionRefusedError,
    "ConnectionResetError": ConnectionResetError,
    "BrokenPipeError": BrokenPipeError,
    "TimeoutError": TimeoutError,
}


def pod_program() -> str:
    """What the pod's Python runs: `web` as a module of the same name, then the loop."""
    lines = [
        "import sys, types",
        "for name in ('tests', 'tests.harness', 'tests.harness.web'): sys.modules[name] = types.ModuleType(name)",
        f"exec({(HERE / 'web.py').read_text()!r}, sys.modules['tests.harness.web'].__dict__)",
        "sys.modules['tests.harness'].web = sys.modules['tests.harness.web']",
        "loop = sys.modules['pod_loop'] = types.ModuleType('pod_loop')",
        f"exec({(HERE / 'pod_loop.py').read_text()!r}, loop.__dict__)",
        "loop.run()",
    ]
    return "\n".join(lines)


class PodTransport:
    """`command`: runs its last argument, a Python program, in the pod, with standard input passed on.

    Such as: kubectl exec -i POD -- python -u -c.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [*command, pod_program()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=None if environment is None else dict(environment),
        )
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {0: queue.SimpleQueue()}
        self._broken = False
        threading.Thread(target=self._read, daemon=True).start()
        self._take(0, self._waiting[0], TIMEOUT_SECONDS)

    def request(
        self,
        method: str,
        url: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float = TIMEOUT_SECONDS,
    ) -> Reply:
        """As `web.request`, from the pod."""
        told = self._ask(method=method, url=url, body=body, headers=headers, seconds=seconds, stream=False)
        return Reply(told["status"], told["headers"], base64.b64decode(told["body"]))

    def stream(
        self, url: str, body: object, *, headers: Mapping[str, str] | None = None, seconds: float = TIMEOUT_SECONDS
    ) -> Streamed:
        """As `web.stream`, from the pod: the times are taken there."""
        told = self._ask(method="POST", url=url, body=body, headers=headers, seconds=seconds, stream=True)
        return Streamed(**{key: value for key, value in told.items() if key != "id"})

    def close(self) -> None:
        """End the session."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(
        self,
        *,
        method: str,
        url: str,
        body: object,
        headers: Mapping[str, str] | None,
        seconds: float,
        stream: bool,
    ) -> dict[str, Any]:
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            if self._broken or self._process.stdin is None:
                raise ConnectionError("the session to the client pod has ended")
            self._number += 1
            number = self._number
            self._waiting[number] = answers
            asked = {"id": number, "method": method, "url": url, "body": body, "headers": dict(headers or {})}
            self._process.stdin.write(json.dumps({**asked, "seconds": seconds, "stream": stream}) + "\n")
            self._process.stdin.flush()
        told = self._take(number, answers, seconds + GRACE_SECONDS)
        if "error" in told:
            raise _ERRORS.get(told["error"], OSError)(f"{told['error']}: {told['message']}")
        return told

    def _take(self, number: int, answers: queue.SimpleQueue[dict[str, Any]], seconds: float) -> dict[str, Any]:
        try:
            told = answers.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no answer from the client pod within {seconds:g} s") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if "broken" in told:
            raise ConnectionError("the session to the client pod broke")
        return told

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._lock:
                waiting = self._waiting.get(told["id"])
            if waiting is not None:
                waiting.put(told)
        with self._lock:
            self._broken = True
            for waiting in self._waiting.values():
                waiting.put({"broken": True})
