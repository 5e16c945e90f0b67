"""The image is made of what the repository has, from hashes, and runs as nobody in particular."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = (ROOT / "Containerfile").read_text()
STAGES = CONTAINERFILE.split("\nFROM ")[1:]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def copied() -> set[str]:
    """What is copied from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.MULTILINE)
    return {name for line in lines for name in line.split()}


def test_everything_that_is_copied_exists_and_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}

    assert [name for name in copied() if not (ROOT / name).exists()] == []
    assert copied() == kept


def test_packages_are_installed_by_hash_only() -> None:
    installs = re.findall(r"pip .*? install (.*?)(?=&&|\nFROM|\Z)", CONTAINERFILE.replace("\\\n", " "))

    assert len(installs) >= 2
    assert [each for each in installs if "--require-hashes" not in each and "--no-index" not in each] == []


def test_libraries_do_not_depend_on_our_code() -> None:
    libraries = STAGES[0]

    assert "requirements-image.txt" in libraries
    assert not re.search(r"COPY .*\b(agent|operator|pyproject\.toml)\b", libraries)


def test_the_last_layer_is_our_package_and_the_user_is_a_number_without_rights() -> None:
    lines = [line for line in STAGES[-1].splitlines() if line]

    assert lines[-1].startswith("COPY --from=package ")
    assert "USER 65532:65532" in lines


def test_no_setting_of_a_build_machine_is_in_it() -> None:
    assert re.findall(r"index-url|trusted-host|find-links|https?://", CONTAINERFILE) == []


@pytest.mark.parametrize("command", sorted(SCRIPTS))
def test_every_command_of_the_image_is_there(command: str) -> None:
    module, _, function = SCRIPTS[command].partition(":")

    assert callable(getattr(importlib.import_module(module), function))
