"""The page that explains skip reasons and the code that gives them name the same ones; the golden files have a tool."""

from __future__ import annotations

import re
from pathlib import Path

from kvpool_operator.webhook.skip_reasons import all_reasons

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## Why a pod was not given the cache"


def test_every_skip_reason_has_an_entry_and_every_entry_a_reason() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = re.split(r"^## ", page.partition(SECTION)[2], flags=re.MULTILINE)[0]
    entries = re.findall(r"^### (\S+)$", section, re.MULTILINE)
    assert sorted(entries) == sorted(all_reasons())
    assert len(entries) == len(set(entries))


def test_every_skip_reason_is_given_somewhere() -> None:
    folder = ROOT / "operator" / "kvpool_operator" / "webhook"
    sources = " ".join(path.read_text() for path in folder.glob("*.py") if path.name != "skip_reasons.py")
    names = re.findall(r"^([A-Z_]+): Final = ", (folder / "skip_reasons.py").read_text(), re.MULTILINE)
    assert len(names) == len(all_reasons())
    assert [name for name in names if not re.search(rf"Skip\(\s*{name},", sources)] == []


def test_reasons_are_camel_case() -> None:
    assert [reason for reason in all_reasons() if not re.fullmatch(r"([A-Z][a-z]*)+", reason)] == []
