"""Load or recompute: is fetching blocks from Valkey quicker than computing their tokens again (DESIGN section 6)?

Pure; time is an argument. Invariant: a pessimistic estimate fades, so that one bad minute never ends fetching for good.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

WORTH_FRACTION = 0.8
"""A fetch is not begun, or given up, when it is expected to take more than this share of recomputing."""
PROJECT_FRACTION = 0.05
PROJECT_MIN_SECONDS = 0.005
"""From 5 % of the time to recompute on, but not before 5 ms, the bytes arrived say how long the whole will take."""
SILENCE_FRACTION = 0.10
SILENCE_MIN_SECONDS = 0.010
"""A fetch of which nothing arrived after 10 % (but 10 ms at least) is given up."""
PRIOR_LATENCY_SECONDS = 0.002
PRIOR_BYTES_PER_SECOND = 300e6
"""Before anything was measured: a Valkey nearby and what one connection carries."""
WEIGHT = 0.2
"""Of the newest sample in the moving averages: about the last ten fetches count."""
HALF_LIFE_SECONDS = 15.0
"""Without new samples the averages go back to the priors with this half-life."""


class Judgement(enum.Enum):
    """What to do with a fetch in flight."""

    WAIT = "wait"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class FetchEstimate:
    """Moving averages of Valkey's latency and throughput as measured until `at_seconds`."""

    latency_seconds: float = PRIOR_LATENCY_SECONDS
    bytes_per_second: float = PRIOR_BYTES_PER_SECOND
    at_seconds: float = 0.0

    def seconds_for(self, size_bytes: int, now_seconds: float) -> float:
        """Expected time to fetch so many bytes."""
        faded = self.faded(now_seconds)
        return faded.latency_seconds + size_bytes / faded.bytes_per_second

    def faded(self, now_seconds: float) -> FetchEstimate:
        """The averages, drawn towards the priors by the time since the last sample."""
        keep = 0.5 ** (max(0.0, now_seconds - self.at_seconds) / HALF_LIFE_SECONDS)
        latency = PRIOR_LATENCY_SECONDS + keep * (self.latency_seconds - PRIOR_LATENCY_SECONDS)
        rate = PRIOR_BYTES_PER_SECOND + keep * (self.bytes_per_second - PRIOR_BYTES_PER_SECOND)
        return FetchEstimate(latency, rate, now_seconds)

    def with_sample(
        self, *, latency_seconds: float, size_bytes: int, seconds: float, now_seconds: float
    ) -> FetchEstimate:
        """The averages after a fetch whose first block took `latency_seconds` and all of it `seconds`."""
        faded = self.faded(now_seconds)
        rate = size_bytes / max(seconds - latency_seconds, 1e-6) if size_bytes else faded.bytes_per_second
        rate = min(rate, 100e9)
        return FetchEstimate(
            faded.latency_seconds + WEIGHT * (latency_seconds - faded.latency_seconds),
            faded.bytes_per_second + WEIGHT * (rate - faded.bytes_per_second),
            now_seconds,
        )


def recompute_seconds(missing_tokens: int, tokens_per_second: float) -> float | None:
    """T: time to compute the tokens again; None when the engine's rate is not known yet."""
    return missing_tokens / tokens_per_second if tokens_per_second > 0 else None


def is_worth_fetching(estimate_seconds: float, recompute: float | None) -> bool:
    """Whether to begin; always while nothing is known of the engine's rate."""
    return recompute is None or estimate_seconds <= WORTH_FRACTION * recompute


def judge(elapsed_seconds: float, recompute: float | None, *, arrived_bytes: int, total_bytes: int) -> Judgement:
    """Whether a fetch in flight is still worth waiting for."""
    if recompute is None:
        return Judgement.WAIT
    if elapsed_seconds > WORTH_FRACTION * recompute:
        return Judgement.GIVE_UP
    if not arrived_bytes:
        silent = elapsed_seconds >= max(SILENCE_FRACTION * recompute, SILENCE_MIN_SECONDS)
        return Judgement.GIVE_UP if silent else Judgement.WAIT
    if elapsed_seconds < max(PROJECT_FRACTION * recompute, PROJECT_MIN_SECONDS):
        return Judgement.WAIT
    projected = elapsed_seconds * total_bytes / arrived_bytes
    return Judgement.GIVE_UP if projected > WORTH_FRACTION * recompute else Judgement.WAIT


def next_look_seconds(recompute: float | None) -> float:
    """Time between two judgements of a fetch."""
    return 1.0 if recompute is None else max(PROJECT_FRACTION * recompute, PROJECT_MIN_SECONDS)
