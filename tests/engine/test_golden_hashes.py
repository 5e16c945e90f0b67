"""The committed golden block hashes are what the installed vLLM makes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.harness.provision import Paths

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "unit" / "golden" / "block_hashes.json"


def test_vllm_makes_the_committed_hashes(parts: Paths, tmp_path: Path) -> None:
    made = tmp_path / "block_hashes.json"
    script = ROOT / "tests" / "engine" / "make_golden_hashes.py"
    command = [str(parts.engine_python), str(script), str(made)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={"PATH": "/usr/bin"})
    assert ended.returncode == 0, ended.stderr[-2_000:]
    assert json.loads(made.read_text()) == json.loads(GOLDEN.read_text())
