"""Writes tests/unit/kserve_pods/golden/: what the webhook makes of each pod that KServe's real controller made.

Invariant: a change of what is injected is seen in a diff of these files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "agent"), str(ROOT / "operator")]

from tests.unit.webhook_pods import GOLDEN, RECORDED_NAMES, outcome, recorded  # noqa: E402


def golden_text(name: str) -> str:
    """The golden file's content for a recorded pod."""
    return json.dumps(outcome(recorded(name)), indent=2) + "\n"


def main() -> None:
    """Write them all."""
    GOLDEN.mkdir(exist_ok=True)
    for stale in GOLDEN.glob("*.json"):
        stale.unlink()
    for name in RECORDED_NAMES:
        (GOLDEN / name).write_text(golden_text(name))


if __name__ == "__main__":
    main()
