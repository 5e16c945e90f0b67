"""The requests in the engine and their open lookups.

Invariant: what is kept of a request goes with it: at its end, or at the end of the load that outlives it (the workers may still
be copying for a request that was aborted), or, should vLLM never tell of its end, within two rounds of `drop_finished`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from vllm.v1.request import Request

DROP_EVERY_STEPS = 4096
"""Steps of the engine between two rounds: seconds to minutes, and no step is long for it."""


class OpenLookup(Protocol):
    """What is read of a lookup."""

    rid: int
    request_id: str
    loading: bool


L = TypeVar("L", bound=OpenLookup)


@dataclass(slots=True, eq=False)
class _Tracked:
    request: Request
    has_failed: bool = False
    was_finished: bool = False


class TrackedRequests(Generic[L]):
    """By request id; lookups also by the id of their question."""

    def __init__(self) -> None:
        self._tracked: dict[str, _Tracked] = {}
        self._lookups: dict[str, L] = {}
        self._asked: dict[int, L] = {}

    def __len__(self) -> int:
        return len(self._tracked)

    def begin(self, request: Request) -> None:
        """A request entered the engine."""
        self._tracked[request.request_id] = _Tracked(request)

    def get(self, request_id: str) -> Request | None:
        """A request that is in the engine."""
        tracked = self._tracked.get(request_id)
        return tracked.request if tracked is not None else None

    def fail(self, request_id: str) -> None:
        """A load of the request failed; of one that has ended meanwhile nothing is remembered."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.has_failed = True

    def has_failed(self, request_id: str) -> bool:
        """Whether a load of the request failed."""
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.has_failed

    def end(self, request_id: str) -> L | None:
        """The request is over; its lookup if nobody needs that any more."""
        self._tracked.pop(request_id, None)
        lookup = self._lookups.get(request_id)
        return lookup if lookup is not None and not lookup.loading else None

    def drop_finished(self) -> list[str]:
        """Requests that were finished already at the last round, of whose end nobody told."""
        overdue = [name for name, tracked in self._tracked.items() if tracked.was_finished]
        for tracked in self._tracked.values():
            tracked.was_finished = tracked.request.is_finished()
        return overdue

    # --- lookups --------------------------------------------------------------------------------------------------

    def ask(self, lookup: L) -> None:
        """A question is open. The former one of its request was closed."""
        self._lookups[lookup.request_id] = self._asked[lookup.rid] = lookup

    def lookup(self, request_id: str) -> L | None:
        """The request's lookup."""
        return self._lookups.get(request_id)

    def asked(self, rid: int) -> L | None:
        """The lookup whose answer is still of interest."""
        return self._asked.get(rid)

    def close_question(self, lookup: L) -> None:
        """No answer is of interest any more; the lookup stays as it is."""
        self._asked.pop(lookup.rid, None)

    def close(self, lookup: L) -> None:
        """The lookup is over."""
        self.close_question(lookup)
        if self._lookups.get(lookup.request_id) is lookup:
            del self._lookups[lookup.request_id]

    def lookups(self) -> Iterator[L]:
        """All of them, as of now."""
        return iter(list(self._lookups.values()))
