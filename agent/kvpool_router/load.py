"""Work in flight and measured prefill rates for each target.

Invariant: every charge is taken back exactly once: its prompt tokens at the first byte of the answer (or when they
must be done, for answers that come whole), the request itself when it ends. Time is an argument.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from statistics import median

_RATE_SAMPLES = 9
_MIN_SAMPLE_TOKENS = 256
"""Shorter prompts measure the engine's step time, not its prefill rate."""
_WHOLE_ANSWER_FACTOR = 2.0
"""Prompt tokens of an answer that comes whole count for this multiple of their expected prefill time."""


@dataclass(slots=True, eq=False)
class Charge:
    """One request in flight at a target."""

    target: str
    tokens: int
    started: float
    measures: bool
    open_tokens: bool = True
    ended: bool = False


@dataclass(slots=True)
class TargetLoad:
    """What one target has in flight, and what was seen of it."""

    queued_tokens: int = 0
    running: int = 0
    recent: float = 0.0
    recent_at: float = 0.0
    last_chosen: int = 0
    is_leaving: bool = False
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_RATE_SAMPLES))


class LoadBook:
    """All targets' load."""

    def __init__(self, half_life_seconds: float) -> None:
        self._half_life_seconds = half_life_seconds
        self._targets: dict[str, TargetLoad] = {}
        self._due: list[tuple[float, int, Charge]] = []
        self._numbers = count(1)

    def targets(self) -> list[str]:
        """Every target that was ever charged or asked for."""
        return list(self._targets)

    def targets_at(self, address: str) -> list[str]:
        """Those of one endpoint: its address, followed by "#" and the DP rank where there are several."""
        return [target for target in self._targets if target.partition("#")[0] == address]

    def queued_tokens(self, target: str, *, now: float) -> int:
        """Prompt tokens in flight whose answer has not begun."""
        self._settle(now)
        return self._of(target).queued_tokens

    def running(self, target: str) -> int:
        """Requests in flight."""
        return self._of(target).running

    def recent(self, target: str, *, now: float) -> float:
        """Requests routed there, each faded by its age."""
        load = self._of(target)
        return float(load.recent * 0.5 ** ((now - load.recent_at) / self._half_life_seconds))

    def last_chosen(self, target: str) -> int:
        """Grows with every request; 0 = never."""
        return self._of(target).last_chosen

    def tokens_per_second(self, target: str) -> float:
        """Median of the last measured prefill rates, 0 when there is none."""
        rates = self._of(target).rates
        return median(rates) if rates else 0.0

    def start(
        self, target: str, *, left_tokens: int, cold: bool, streaming: bool, now: float, prefill_seconds: float | None
    ) -> Charge:
        """Charge a request.

        cold: nothing of the prompt is expected to be held, so that it may measure the rate. streaming: the first byte
        of its answer tells when the prompt was computed; else `prefill_seconds` (None: not known) must do.
        """
        load = self._of(target)
        load.is_leaving = False
        measures = cold and streaming and load.running == 0 and left_tokens >= _MIN_SAMPLE_TOKENS
        charge = Charge(target, left_tokens, now, measures=measures)
        load.recent = self.recent(target, now=now) + 1
        load.recent_at = now
        load.queued_tokens += left_tokens
        load.running += 1
        number = next(self._numbers)
        load.last_chosen = number
        if not streaming and prefill_seconds is not None:
            due = now + _WHOLE_ANSWER_FACTOR * prefill_seconds
            heapq.heappush(self._due, (due, number, charge))
        return charge

    def first_byte(self, charge: Charge, *, now: float) -> None:
        """The answer began: the prompt is computed. Measures the rate where the prompt was cold and alone."""
        if not charge.open_tokens:
            return
        self._close_tokens(charge)
        seconds = now - charge.started
        if charge.measures and seconds > 0:
            self._of(charge.target).rates.append(charge.tokens / seconds)

    def end(self, charge: Charge) -> None:
        """The request is over, however it ended."""
        if charge.ended:
            return
        charge.ended = True
        self._close_tokens(charge)
        load = self._of(charge.target)
        load.running -= 1
        if load.is_leaving and not load.running:
            del self._targets[charge.target]

    def forget(self, target: str) -> None:
        """The target is gone; remembered until its last request ended."""
        load = self._of(target)
        load.is_leaving = True
        if not load.running:
            del self._targets[target]

    def _close_tokens(self, charge: Charge) -> None:
        if charge.open_tokens:
            charge.open_tokens = False
            self._of(charge.target).queued_tokens -= charge.tokens

    def _settle(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            self._close_tokens(heapq.heappop(self._due)[2])

    def _of(self, target: str) -> TargetLoad:
        return self._targets.setdefault(target, TargetLoad())
