"""What the engine has to do, told to routers through the agent.

Invariant: less to do is told at once, more within REPORT_SECONDS while the engine steps, and within the client's idle time
otherwise; what was told last is what was true last, from whichever thread it was told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpool_core import wire

if TYPE_CHECKING:
    from vllm.v1.request import Request

REPORT_SECONDS = 0.05
"""A router counts its own requests by itself; those of other routers may be this late."""


class LoadReport:
    """The requests in the engine, and what was told last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[str, Request] = {}
        self._told: tuple[int, int] | None = None
        self._next = 0.0

    def forget(self) -> None:
        """The agent is a new one: tell it whatever there is."""
        self._told, self._next = None, 0.0

    def began(self, request: Request) -> None:
        """A request entered the engine."""
        with self._lock:
            self._requests[request.request_id] = request

    def ended(self, request: Request) -> None:
        """It has its answer, or nobody wants it any more."""
        with self._lock:
            self._requests.pop(request.request_id, None)

    def report(self, send: Callable[[wire.Message], bool], *, now: float) -> None:
        """Tell the load if it changed; more of it not too often. now: time.monotonic()."""
        with self._lock:
            left = [max(0, r.num_prompt_tokens - r.num_computed_tokens) for r in self._requests.values()]
            load = len(left), sum(left)
            if load == self._told or (now < self._next and not self._is_relief(load)):
                return
            if send(wire.EngineLoad(0, *load)):
                self._told, self._next = load, now + REPORT_SECONDS

    def _is_relief(self, load: tuple[int, int]) -> bool:
        """Whether a request is over or the last prompt is computed: a router that does not know sends the next one elsewhere."""
        return self._told is not None and (load[0] < self._told[0] or load[1] == 0)
