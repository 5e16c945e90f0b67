"""What `make test` ran, by suite: `python3 tools/count_suites.py LOG` prints pytest's counts of each. A bare Python 3.11 will do.

Ends with 1 when a suite of `SUITES` did not run, failed, or skipped a test though nothing but a GPU may be missing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

SUITES = ("unit", "gpu", "engine", "cluster")
MAY_SKIP = frozenset({"gpu"})
_COMMAND = re.compile(r"-m pytest tests/(\w+)")
_CLOSING = re.compile(
    r"^=+ (?P<counts>.*\b(?:passed|failed|skipped|errors?|no tests ran)\b.*) in (?P<time>\S+s\b.*?) =+$"
)
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error|xfailed|xpassed|deselected)s?\b")

Counts = dict[str, int]


def closing_lines(log: str) -> dict[str, tuple[Counts, str]]:
    """Suite to its counts by outcome and its closing line, from the commands that make echoes and pytest's last lines."""
    found: dict[str, tuple[Counts, str]] = {}
    suite = ""
    for line in log.splitlines():
        if command := _COMMAND.search(line):
            suite = command[1]
        elif suite and (closing := _CLOSING.match(line)):
            counts = {outcome: int(count) for count, outcome in _COUNT.findall(closing["counts"])}
            found[suite] = (counts, f"{closing['counts']} in {closing['time']}")
            suite = ""
    return found


def problem_of(suite: str, counts: Counts | None) -> str:
    """What is wrong with a suite, "" when nothing is."""
    if counts is None:
        return "did not run to its end"
    if counts.get("failed") or counts.get("error"):
        return "failed"
    if not MAY_SKIP & {suite}:
        if not counts.get("passed"):
            return "nothing passed"
        if counts.get("skipped"):
            return "skipped tests, which only those of a GPU may be"
    return ""


def report(log: str) -> tuple[list[str], bool]:
    """A line for each suite, and whether all is well."""
    found = closing_lines(log)
    lines, is_well = [], True
    for suite in SUITES:
        counts, closing = found.get(suite, (None, ""))
        problem = problem_of(suite, counts)
        is_well = is_well and not problem
        lines.append(": ".join(part for part in (suite.ljust(8), closing, problem.upper()) if part))
    return lines, is_well


def main(arguments: Sequence[str]) -> int:
    """Print and judge."""
    lines, is_well = report(Path(arguments[0]).read_text(errors="replace"))
    print("\n".join(lines))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
