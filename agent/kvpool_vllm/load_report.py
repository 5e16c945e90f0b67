"""What the engine has to do, told to routers through the agent.

Invariant: a change is told within REPORT_SECONDS while the engine steps, and within the client's idle time otherwise; what
was told last is what was true last, from whichever thread it was told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvpool_core import wire

if TYPE_CHECKING:
    from vllm.v1.request import Request

REPORT_SECONDS = 0.05
"""A router counts its own requests by itself; those of other routers may be this late."""


class LoadReport:
    """What was told last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: tuple[int, int] | None = None
        self._next = 0.0

    def forget(self) -> None:
        """The agent is a new one: tell it whatever there is."""
        self._told, self._next = None, 0.0

    def report(
        self, requests: Callable[[], Sequence[Request]], send: Callable[[wire.Message], bool], *, now: float
    ) -> None:
        """Tell the load, unless nothing changed or something was told a moment ago. now: time.monotonic()."""
        with self._lock:
            if now < self._next:
                return
            left = [max(0, request.num_prompt_tokens - request.num_computed_tokens) for request in requests()]
            load = len(left), sum(left)
            if load != self._told and send(wire.EngineLoad(0, *load)):
                self._told, self._next = load, now + REPORT_SECONDS
