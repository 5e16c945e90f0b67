"""Every field of vLLM's configuration is decided about: part of the domain, or nothing to a block's bytes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness.provision import Paths

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(parts: Paths, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script found."""
    script = ROOT / "tests" / "engine" / "compare_configuration.py"
    environment = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT / "agent"), "HF_HUB_OFFLINE": "1"}
    command = [str(parts.engine_python), str(script), str(tmp_path_factory.mktemp("model"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout[-2_000:] + ended.stderr[-4_000:]
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def test_no_field_of_vllms_configuration_is_undecided(found: dict[str, Any]) -> None:
    assert (found["undecided"], found["unknown"]) == ([], [])


def test_engines_share_unless_what_they_compute_differs(found: dict[str, Any]) -> None:
    assert len(set(found["sharing"])) == 1
    for name in ("apart", "processing", "adapters"):
        assert len(set(found[name])) == len(found[name]), name


def test_load_of_an_adapter_is_noted_when_vllms_core_is_told(found: dict[str, Any]) -> None:
    assert found["noted"]
