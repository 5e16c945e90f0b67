"""The demo's result: one row a step, as a table for people and as JSON for programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

TIERS = ("gpu", "ram", "valkey")


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt at one step."""

    ttft_seconds: float
    prompt_tokens: int
    loaded_tokens: dict[str, int]
    node: str
    answer_equal: bool
    route: str = ""


@dataclass(slots=True)
class Row:
    """One step: medians over its prompts; `problems` says what was expected and did not come."""

    step: str
    measured: list[Measured] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def expect(self, met: bool, problem: str) -> None:
        """Note a problem, with what was measured, unless the expectation is met."""
        if not met:
            details = (f"{m.node} {m.loaded_tokens} equal={m.answer_equal} {m.route}".strip() for m in self.measured)
            self.problems.append(f"{problem}: " + "; ".join(details))

    @property
    def ok(self) -> bool:
        """Whether everything expected came."""
        return bool(self.measured) and not self.problems

    @property
    def ttft_seconds(self) -> float:
        """Median time to first token."""
        return statistics.median(m.ttft_seconds for m in self.measured)

    @property
    def prompt_tokens(self) -> int:
        """Median prompt length."""
        return int(statistics.median(m.prompt_tokens for m in self.measured))

    @property
    def computed_tokens(self) -> int:
        """Median of the tokens that no tier supplied."""
        return int(statistics.median(m.prompt_tokens - sum(m.loaded_tokens.values()) for m in self.measured))

    def loaded_tokens(self, tier: str) -> int:
        """Median of the tokens that a tier supplied."""
        return int(statistics.median(m.loaded_tokens.get(tier, 0) for m in self.measured))

    @property
    def node(self) -> str:
        """Where the step's requests went."""
        return ",".join(sorted({m.node for m in self.measured}))

    @property
    def answer_equal(self) -> bool:
        """Whether every answer was the reference's, bit for bit."""
        return all(m.answer_equal for m in self.measured)

    def as_json(self) -> dict[str, object]:
        """The row for `.kvpool/demo.json`."""
        return {
            "step": self.step,
            "ttft_seconds": round(self.ttft_seconds, 4),
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "loaded_tokens": {tier: self.loaded_tokens(tier) for tier in TIERS},
            "node": self.node,
            "answer_equal": self.answer_equal,
            "ok": self.ok,
        }


HEADER = ("step", "ttft", "prompt", "computed", "gpu", "ram", "valkey", "node", "answer equal", "ok")


def render(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [HEADER]
    for row in rows:
        tiers = (str(row.loaded_tokens(tier)) for tier in TIERS)
        verdicts = ("yes" if row.answer_equal else "no", "yes" if row.ok else "NO")
        figures = (f"{row.ttft_seconds:.3f} s", str(row.prompt_tokens), str(row.computed_tokens))
        lines.append((row.step, *figures, *tiers, row.node, *verdicts))  # type: ignore[arg-type]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
