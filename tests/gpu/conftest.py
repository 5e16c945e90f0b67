"""Tests of the CUDA path: they need a CUDA device and vLLM's compiled operations; elsewhere each is skipped with the reason."""

from __future__ import annotations

import importlib.util

import pytest


def missing() -> str:
    """Why these tests cannot run here; "" when they can."""
    for module in ("torch", "vllm"):
        if importlib.util.find_spec(module) is None:
            return f"no {module} in this environment: run tests/gpu in one that has vLLM for CUDA"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run, and say why."""
    reason = missing()
    for item in items if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))
