"""Runs the commands of provisioning: quiet while they work, their last lines shown when they fail.

Invariant: every command's whole output is in `.kvpool/logs/provision-<stage>.log`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness.provision_cache import ProvisionError

_LAST_LINES = 25


def run_logged(
    command: Sequence[str | Path],
    *,
    log: Path,
    environment: Mapping[str, str],
    what: str,
    remedy: str = "",
    folder: Path | None = None,
) -> None:
    """Run a command, in `folder` if given; a ProvisionError with the end of its output if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ {' '.join(map(str, command))}\n".encode())
        output.flush()
        code = subprocess.call(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
        )
    if code:
        raise ProvisionError(f"{what} failed (exit {code}). {remedy}\nThe end of {log}:\n{_tail(log)}")


def installer_environment(cache: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for pip and uv: never asks, never fetches a Python, keeps downloads in our cache.

    uv does not read pip's settings, so the ones that decide whether packages are reached at all are handed over.
    """
    passed = {
        name: value for name, value in environment.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    }
    passed |= {
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_CACHE_DIR": str(cache / "downloads"),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
        "UV_HTTP_TIMEOUT": environment.get("UV_HTTP_TIMEOUT", environment.get("PIP_DEFAULT_TIMEOUT", "180")),
    }
    for theirs, ours in (
        ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"),
        ("PIP_EXTRA_INDEX_URL", "UV_INDEX"),
        ("PIP_CERT", "SSL_CERT_FILE"),
    ):
        if theirs in environment:
            passed.setdefault(ours, environment[theirs])
    return passed


def pip_setting(python: Path, name: str) -> str:
    """A value from the user's pip configuration, empty if there is none."""
    asked = subprocess.run(
        [python, "-m", "pip", "config", "get", name],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() if asked.returncode == 0 else ""


def without(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    """The environment less some names."""
    return {name: value for name, value in environment.items() if name not in names}


def process_environment() -> dict[str, str]:
    """What this process was started with: read here and nowhere else."""
    return dict(os.environ)


def _tail(log: Path) -> str:
    return "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
