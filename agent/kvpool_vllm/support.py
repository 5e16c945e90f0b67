"""Which vLLM and which Python this connector is for. Runs on any Python 3.8, without vLLM."""

from __future__ import annotations

import re

SUPPORTED_VLLM = (0, 32)
OLDEST_PYTHON = (3, 11)


def find_problem(vllm_version: str, python: tuple[int, ...]) -> str:
    """Why the connector cannot be used; "" when it can. `vllm_version`: as the package says, "" when that is not known."""
    found = re.match(r"(\d+)\.(\d+)", vllm_version)
    if found is None or (int(found.group(1)), int(found.group(2))) != SUPPORTED_VLLM:
        supported = ".".join(str(part) for part in SUPPORTED_VLLM)
        return (
            f"vLLM {vllm_version or 'of unknown version'} is not supported, this release of kvpool is for {supported}"
        )
    if python < OLDEST_PYTHON:
        return f"Python {'.'.join(map(str, python))} is not supported, {'.'.join(map(str, OLDEST_PYTHON))} or newer is"
    return ""
