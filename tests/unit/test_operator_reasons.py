"""Every reason is documented, and nothing is documented that is none."""

from __future__ import annotations

import re
from pathlib import Path

from kvpool_operator import reasons
from kvpool_operator.valkey import heal, topology

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## Conditions and Events of a pool"


def entries() -> list[str]:
    """Entries of the section."""
    section = (ROOT / "docs" / "troubleshooting.md").read_text().partition(f"{SECTION}\n")[2]
    return re.findall(r"^### (\S+)$", re.split(r"^## ", section, flags=re.MULTILINE)[0], re.MULTILINE)


def test_reasons_and_entries_are_the_same() -> None:
    assert sorted(entries()) == sorted(reasons.all_reasons())


def test_reasons_are_camel_case_and_each_is_one() -> None:
    every = reasons.all_reasons()

    assert len(set(every)) == len(every)
    assert [reason for reason in every if not re.fullmatch(r"([A-Z][a-z]+)+", reason)] == []


def test_reasons_of_healing_are_among_them() -> None:
    folder = Path(topology.__file__).parent
    texts = "".join(path.read_text() for path in folder.glob("*.py"))
    given = {
        text for text in re.findall(r'"((?:[A-Z][a-z]+){2,})"', texts) if text not in heal.__all__ + topology.__all__
    }

    assert given - set(reasons.all_reasons()) == set()
    assert {"ClusterForming", "ShardMissing"} <= given


def test_each_reason_is_given_somewhere() -> None:
    folder = ROOT / "operator" / "kvpool_operator"
    texts = "".join(path.read_text() for path in folder.rglob("*.py") if path.name != "reasons.py")
    names = [name for name, value in vars(reasons).items() if name.isupper() and value in reasons.all_reasons()]

    unused = [name for name in names if f"reasons.{name}" not in texts and f'"{getattr(reasons, name)}"' not in texts]

    assert unused == []
