"""Suites are counted by name from a log of `make test`, and a skip outside the GPU's suite does not pass unseen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.count_suites import SUITES, main, report

GOOD = {
    "unit": "====== 1412 passed in 75.10s (0:01:15) ======",
    "gpu": "====== 3 skipped in 0.05s ======",
    "engine": "====== 106 passed in 597.20s (0:09:57) ======",
    "cluster": "====== 66 passed, 2 warnings in 664.00s (0:11:04) ======",
}


def log_of(**changed: str | None) -> str:
    """A log as make and pytest write it; None leaves a suite out."""
    lines = ["ruff check .", "All checks passed!"]
    for suite, closing in {**GOOD, **changed}.items():
        if closing is not None:
            lines += [f".kvpool/venv/bin/python -m pytest tests/{suite} --timeout=60", "collected 5 items", closing]
    return "\n".join(lines)


def test_all_suites_are_named_with_their_counts() -> None:
    lines, is_well = report(log_of())
    assert is_well
    assert [line.split(":")[0].strip() for line in lines] == list(SUITES)
    assert lines[2] == "engine  : 106 passed in 597.20s (0:09:57)"


@pytest.mark.parametrize(
    ("suite", "closing", "said"),
    [
        ("unit", "=== 1 failed, 1411 passed in 75.10s (0:01:15) ===", "FAILED"),
        ("gpu", "=== 1 failed, 2 skipped in 0.10s ===", "FAILED"),
        ("engine", "=== 105 passed, 1 skipped in 597.20s (0:09:57) ===", "SKIPPED"),
        ("engine", "=== 105 passed, 1 error in 597.20s (0:09:57) ===", "FAILED"),
        ("engine", "=== 100 passed, 2 errors in 597.20s (0:09:57) ===", "FAILED"),
        ("cluster", "=== no tests ran in 0.50s ===", "NOTHING PASSED"),
        ("cluster", None, "DID NOT RUN"),
    ],
)
def test_what_is_wrong_is_said_of_its_suite_only(suite: str, closing: str | None, said: str) -> None:
    lines, is_well = report(log_of(**{suite: closing}))
    assert not is_well
    assert [said in line for line in lines] == [name == suite for name in SUITES]


def test_suite_that_broke_off_is_not_given_the_counts_of_the_next() -> None:
    log = log_of(engine="make: *** [test-engine] Error 2")
    lines, is_well = report(log)
    assert not is_well
    assert "DID NOT RUN" in lines[2]
    assert "66 passed" in lines[3]


def test_command_prints_and_ends_with_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "ci.log"
    log.write_text(log_of())
    assert main([str(log)]) == 0
    log.write_text(log_of(engine=None))
    assert main([str(log)]) == 1
    assert "unit    : 1412 passed" in capsys.readouterr().out
