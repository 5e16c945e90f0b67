"""The answers to compare with, and how much of a prompt an engine took from where."""

from __future__ import annotations

from dataclasses import dataclass

from tests.harness.engine import Engine
from tests.harness.engine_client import BLOCK_SIZE, Answer, metric_sum


@dataclass(frozen=True, slots=True)
class Pair:
    """Answers of an engine without the connector: computed, and from its own prefix cache."""

    cold: Answer
    cached: Answer


def reference_pair(reference: Engine, prompt: str) -> Pair:
    """Ask twice on an empty cache."""
    reference.reset_own_cache()
    return Pair(reference.complete(prompt), reference.complete(prompt))


def whole_blocks(prompt: str) -> int:
    """Tokens of a prompt that lie in whole blocks."""
    return len(prompt) // BLOCK_SIZE * BLOCK_SIZE


def loaded(engine: Engine) -> dict[str, int]:
    """Tokens an engine loaded so far, by tier."""
    text = engine.metrics()
    return {
        tier: int(metric_sum(text, "kvpool_connector_loaded_tokens_total", tier=tier)) for tier in ("ram", "valkey")
    }


class Loads:
    """Tokens loaded by an engine since this was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = loaded(engine)

    def by_tier(self) -> dict[str, int]:
        """Difference by tier."""
        now = loaded(self._engine)
        return {tier: now[tier] - self._before[tier] for tier in now}
