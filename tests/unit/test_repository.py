"""Guards on the repository itself: what a tool cannot check and a mistake would break silently."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvpool_agent import pod_identity
from kvpool_core import wire
from kvpool_router.reasons import ALL_REASONS

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {  # lock file: the least number of packages that makes sense
    "requirements-dev.txt": 30,
    "requirements-engine.txt": 30,
    "requirements-image.txt": 30,
    "requirements-build.txt": 4,
}
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".json", ""}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|home/\w+|Users/\w+|work/(?:main|shared)|tmp/\w+)\b")


def tracked_files() -> list[Path]:
    """Every file that is committed, or would be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    files = [ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    return [path for path in files if path.is_file()]


def targets() -> dict[str, str]:
    """Make target to its help text (empty without one)."""
    rules = re.findall(r"^([a-z][a-z-]*):(?!=)[^\n#]*(?:##\s*(.*))?$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return dict(rules)


@pytest.mark.parametrize("folder", ["operator", "agent"])
def test_plain_folders_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), "it would shadow the standard library's `operator`"


def test_import_operator_gives_the_standard_library() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.__file__)"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert Path(found.stdout.strip()).parent == Path(os.__file__).parent


def test_no_file_names_a_path_of_one_machine() -> None:
    texts = [path for path in tracked_files() if path.suffix in TEXT and path != Path(__file__)]

    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]

    assert found == []


@pytest.mark.parametrize(("lock", "least"), LOCKS.items())
def test_lock_files_pin_with_hashes_and_name_no_host(lock: str, least: int) -> None:
    text = (ROOT / lock).read_text()

    pinned = re.findall(r"^[a-z0-9][a-z0-9.-]*==\S+.*(?:\n    --hash=sha256:[0-9a-f]{64}.*)+$", text, re.MULTILINE)

    assert len(pinned) == len(re.findall(r"^[a-z0-9]", text, re.MULTILINE)) >= least
    assert re.findall(r"://|--(?:extra-)?index-url|--find-links|--trusted-host", text) == []


def test_every_target_of_the_issue_exists_and_every_target_has_help() -> None:
    expected = [
        "demo-local",
        "demo",
        "demo-down",
        "test",
        "test-unit",
        "test-engine",
        "test-gpu",
        "lint",
        "generate",
        "verify",
        "bench",
        "help",
    ]

    assert set(expected) <= targets().keys()
    assert [name for name, help_text in targets().items() if not help_text] == []


def test_every_dependency_is_bounded_on_both_sides() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [need for extra in project["optional-dependencies"].values() for need in extra]
    needs = [need for need in [*project["dependencies"], *optional] if not need.startswith("kvpool[")]

    assert [need for need in needs if not (">=" in need and "<" in need)] == []


def test_every_package_has_its_folder() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]

    assert [package for package in wheel["packages"] if not (ROOT / package / "__init__.py").is_file()] == []


def test_unit_tests_cannot_leave_this_machine() -> None:
    with socket.socket() as sock, pytest.raises(RuntimeError, match="loopback"):
        sock.connect(("192.0.2.1", 9))


def test_every_route_reason_and_refusal_code_has_a_troubleshooting_entry() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sources = [path.read_text() for path in (ROOT / "agent" / "kvpool_agent").glob("*.py")]
    codes = {pod_identity.TOKEN_MISSING, pod_identity.TOKEN_REJECTED, pod_identity.TOKEN_UNBOUND}
    codes |= {wire.NAMESPACE_NOT_ALLOWED, *wire.TEMPORARY_REFUSALS}
    for source in sources:
        codes.update(re.findall(r'"((?:[A-Z][a-z]+){2,})", (?:str\(|f"|problem|text)', source))

    assert {"UnsupportedProtocol", "EngineMismatch", "ArenaUnavailable"} <= codes
    assert [entry for entry in [*ALL_REASONS, *sorted(codes)] if f"| `{entry}` |" not in page] == []


def test_links_between_pages_lead_somewhere() -> None:
    pages = [path for path in tracked_files() if path.suffix == ".md"]

    broken = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / link).exists()
    ]

    assert broken == []
