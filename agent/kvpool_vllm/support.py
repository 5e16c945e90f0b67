"""Which vLLM and which Python this connector is for. Runs on any Python 3.8, without vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping

SUPPORTED_VLLM = (0, 32)
OLDEST_PYTHON = (3, 11)
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


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


def find_expandable_segments(environment: Mapping[str, str]) -> str:
    """The variable that turns PyTorch's expandable segments on, with which vLLM refuses a connector; "" when none does."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower():
            return name
    return ""
