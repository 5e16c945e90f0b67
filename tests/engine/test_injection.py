"""The webhook reads flags as the installed vLLM does, and the injected folder keeps no model from starting in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvpool_vllm.inject import inject
from tests.harness.provision import Paths

ROOT = Path(__file__).resolve().parents[2]


def test_vllm_is_as_the_webhook_and_the_injected_folder_take_it_to_be(parts: Paths, tmp_path: Path) -> None:
    inject(tmp_path / "connector")
    script = ROOT / "tests" / "engine" / "compare_injection.py"
    environment = {
        "PATH": "/usr/bin",
        "PYTHONPATH": f"{tmp_path / 'connector'}:{ROOT / 'operator'}",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(parts.engine_python), str(script), str(tmp_path / "whisper")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout[-2_000:] + ended.stderr[-2_000:]
    assert ended.stdout.count(" 0 different") == 4
    assert "encoder-decoder: True, connector: None" in ended.stdout
    assert "encoder-decoder models are not supported" in ended.stderr
