"""The engine's prefill rate, measured from its own steps.

Invariant: a step's tokens are divided by its own time: vLLM hands the next steps out before the first has ended (asynchronous
scheduling), and they end in the order in which they began.
"""

from __future__ import annotations

from collections import deque

MIN_STEP_TOKENS = 128
"""Steps with fewer tokens are decoding more than prefilling."""
WEIGHT = 0.3
"""Weight of the newest step in the moving average."""
STEPS_IN_FLIGHT_MAX = 16
"""vLLM has two at once."""


class PrefillRate:
    """Moving average of tokens per second over steps that are mostly prefill, or a fixed rate; times in seconds."""

    def __init__(self, fixed: float = 0.0) -> None:
        self.tokens_per_second = fixed
        self._is_fixed = fixed > 0
        self._in_flight: deque[tuple[int, float]] = deque(maxlen=STEPS_IN_FLIGHT_MAX)
        self._last_ended = 0.0

    def step_began(self, tokens: int, now: float) -> None:
        """A step with `tokens` scheduled tokens is handed to the workers."""
        self._in_flight.append((tokens, now))

    def step_ended(self, now: float) -> None:
        """The output of the first step in flight is here."""
        if not self._in_flight:
            return
        tokens, began = self._in_flight.popleft()
        elapsed, self._last_ended = now - max(began, self._last_ended), now
        if self._is_fixed or tokens < MIN_STEP_TOKENS or elapsed <= 0:
            return
        rate = tokens / elapsed
        former = self.tokens_per_second
        self.tokens_per_second = rate if former == 0 else former + WEIGHT * (rate - former)
