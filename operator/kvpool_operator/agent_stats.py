"""Asks agents how they are, and to drain.

Invariant: whatever answers, asking never takes longer than its deadline and never raises: what went wrong is part of the answer.
Draining changes an agent, so only the leader may ask for it.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from kvpool_operator.bounded_socket import BoundedSocket
from kvpool_operator.fence import Fence, sending_under
from kvpool_operator.observed import AgentStats, Pod
from kvpool_operator.plan.pods import ADMIN_PORT

ASK_TIMEOUT_SECONDS = 2.0
ALL_TIMEOUT_SECONDS = 10.0
"""For all agents of a pool together; those not reached by then are left out."""
THREADS = 16
ANSWER_MAX_BYTES = 4 << 20
TEXT_MAX_CHARACTERS = 1000
NO_ANSWER = (OSError, http.client.HTTPException, ValueError, RecursionError)
"""What comes of a connection, of HTTP and of JSON that are none."""


def ask_all(pods: Iterable[Pod], token: str, *, port: int = ADMIN_PORT) -> dict[str, AgentStats]:
    """What each agent says, by pod uid. Pods that cannot answer yet are left out."""
    asked = [pod for pod in pods if pod.ip and pod.phase == "Running" and not pod.is_terminating]
    if not asked:
        return {}
    threads = ThreadPoolExecutor(max_workers=min(THREADS, len(asked)), thread_name_prefix="agent-stats")
    try:
        futures = {threads.submit(ask, pod.ip, token, port=port): pod.uid for pod in asked}
        done, _ = wait(futures, timeout=ALL_TIMEOUT_SECONDS)
        return {futures[future]: future.result() for future in done}
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def ask(ip: str, token: str, *, port: int = ADMIN_PORT) -> AgentStats:
    """What one agent says."""
    try:
        return parse_stats(_request("GET", ip, port, "/v1/stats", token, ASK_TIMEOUT_SECONDS))
    except NO_ANSWER as error:
        return AgentStats(error=f"{type(error).__name__}: {error}")


def drain(ip: str, token: str, seconds: float, *, fence: Fence, port: int = ADMIN_PORT) -> bool:
    """Have an agent write to Valkey what waits; whether it did in time. NotLeaderError when the fence is shut."""
    try:
        path = f"/v1/drain?timeout_seconds={seconds:g}"
        with sending_under(fence):
            return bool(_request("POST", ip, port, path, token, seconds + ASK_TIMEOUT_SECONDS).get("drained"))
    except NO_ANSWER:
        return False


def parse_stats(answer: Mapping[str, Any]) -> AgentStats:
    """The parts of `/v1/stats` that status is made from; what is of another type counts as absent."""
    arena, valkey = _part(answer, "arena"), _part(answer, "valkey")
    return AgentStats(
        is_ready=answer.get("ready") is True,
        waiting_for=_text(answer, "waiting_for") or _text(arena, "waiting_for"),
        arena_reason=_text(arena, "reason"),
        valkey_state=_text(valkey, "state"),
        valkey_detail=_text(valkey, "detail"),
    )


def _part(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = answer.get(name)
    return value if isinstance(value, dict) else {}


def _text(answer: Mapping[str, Any], name: str) -> str:
    value = answer.get(name)
    return value[:TEXT_MAX_CHARACTERS] if isinstance(value, str) else ""


def _request(method: str, ip: str, port: int, path: str, token: str, timeout_seconds: float) -> Mapping[str, Any]:
    """A decoded JSON answer. Straight to the pod: proxies of the environment are for other traffic."""
    deadline = time.monotonic() + timeout_seconds
    bounded = BoundedSocket.take_over(socket.create_connection((ip, port), timeout_seconds))
    bounded.grant(deadline=deadline, max_bytes=ANSWER_MAX_BYTES)
    connection = http.client.HTTPConnection(ip, port)
    connection.sock = bounded
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {token}", "Connection": "close"})
        with connection.getresponse() as response:
            body = response.read()
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            answer = json.loads(body)
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise ValueError("the answer is no JSON object")
    return answer
