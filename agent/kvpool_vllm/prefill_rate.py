"""The engine's prefill rate, measured from its own steps."""

from __future__ import annotations

MIN_STEP_TOKENS = 128
"""Steps with fewer tokens are decoding more than prefilling."""
WEIGHT = 0.3
"""Weight of the newest step in the moving average."""


class PrefillRate:
    """Moving average of tokens per second over steps that are mostly prefill, or a fixed rate; times in seconds."""

    def __init__(self, fixed: float = 0.0) -> None:
        self.tokens_per_second = fixed
        self._is_fixed = fixed > 0
        self._tokens = 0
        self._started = 0.0

    def step_began(self, tokens: int, now: float) -> None:
        """A step with `tokens` scheduled tokens is handed to the workers."""
        self._tokens, self._started = tokens, now

    def step_ended(self, now: float) -> None:
        """Its output is here."""
        elapsed, tokens, self._tokens = now - self._started, self._tokens, 0
        if self._is_fixed or tokens < MIN_STEP_TOKENS or elapsed <= 0:
            return
        rate = tokens / elapsed
        former = self.tokens_per_second
        self.tokens_per_second = rate if former == 0 else former + WEIGHT * (rate - former)
