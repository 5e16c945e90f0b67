"""With an agent's verdicts vLLM's own lookup finds what it would find if every stored block were a hit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.harness.provision import Paths

ROOT = Path(__file__).resolve().parents[2]


def test_vllm_finds_all_that_is_stored_whatever_the_groups_of_the_model(parts: Paths) -> None:
    """Sliding windows, recurrent states and a draft model's groups, whose last block vLLM drops."""
    command = [str(parts.engine_python), str(ROOT / "tests" / "engine" / "compare_lookups.py")]
    environment = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT / "agent")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2_000:]
    assert ended.stdout.count(" 0 different") == ended.stdout.count("requests") > 10
