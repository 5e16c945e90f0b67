"""What the engine has to do, told to routers through the agent.

Invariant: less to do is told at once, more within REPORT_SECONDS while the engine steps, and within the client's idle time
otherwise; what was told last is what was true last, from whichever thread it was told.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpool_core import wire

if TYPE_CHECKING:
    from vllm.v1.request import Request

REPORT_SECONDS = 0.05
"""A router counts its own requests by itself; those of other routers may be this late."""


class LoadReport:
    """The requests in the engine, and what was told last.

    vLLM counts what is computed by itself, so `_left` (prompt tokens by request, where any were left) is of the last look
    at all requests, which is taken every REPORT_SECONDS at most: with thousands waiting it costs a noticeable time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[str, Request] = {}
        self._left: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0
        self._told: tuple[int, int] | None = None
        self._next = 0.0
        self._next_look = 0.0

    def forget(self) -> None:
        """The agent is a new one: tell it whatever there is."""
        self._told, self._next = None, 0.0

    def clear(self) -> None:
        """Nothing is told any more."""
        with self._lock:
            self._requests.clear()
            self._left.clear()

    def began(self, request: Request) -> None:
        """A request entered the engine."""
        with self._lock:
            self._requests[request.request_id] = request
            self._note(request.request_id, _left(request))

    def ended(self, request: Request) -> None:
        """It has its answer, or nobody wants it any more."""
        with self._lock:
            self._requests.pop(request.request_id, None)
            self._note(request.request_id, 0)

    def report(self, send: Callable[[wire.Message], bool], *, now: float) -> None:
        """Tell the load if it changed; more of it not too often. now: time.monotonic()."""
        with self._lock:
            if now >= self._next_look or self._has_computed_all():
                self._look(now)
            load = len(self._requests), self._tokens
            if load == self._told or (now < self._next and not self._is_relief(load)):
                return
            if send(wire.EngineLoad(0, *load)):
                self._told, self._next = load, now + REPORT_SECONDS

    def _note(self, request_id: str, left: int) -> None:
        self._tokens += left - self._left.pop(request_id, 0)
        if left:
            self._left[request_id] = left

    def _look(self, now: float) -> None:
        """At every request: a preempted one has more left than it had, and one that is over counts no more, told or not."""
        self._requests = {name: request for name, request in self._requests.items() if not request.is_finished()}
        self._left = OrderedDict((name, left) for name, request in self._requests.items() if (left := _left(request)))
        self._tokens = sum(self._left.values())
        self._next_look = now + REPORT_SECONDS

    def _has_computed_all(self) -> bool:
        """Whether the last prompt was computed since the last look; looks at no more requests than it takes off."""
        if not self._left:
            return False
        while self._left:
            name = next(iter(self._left))
            if _left(self._requests[name]):
                return False
            self._note(name, 0)
        return True

    def _is_relief(self, load: tuple[int, int]) -> bool:
        """Whether a request is over or the last prompt is computed: a router that does not know sends the next one elsewhere."""
        return self._told is not None and (load[0] < self._told[0] or load[1] == 0)


def _left(request: Request) -> int:
    """Tokens of its prompt that are not computed yet."""
    return max(0, request.num_prompt_tokens - request.num_computed_tokens)
