"""Runs when a Python process of an injected engine starts, before the program: takes our flags away where they do not fit.

Only in the engine's own interpreter can be known which vLLM it has, and a version that does not know a flag, or a value of
it, would refuse to start. Invariant: only arguments that the webhook appended are removed, and nothing in here raises.
Runs on any Python 3.8.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from pathlib import Path

from kvpool_vllm.support import find_expandable_segments, find_problem

TRANSFER_FLAG = "--kv-transfer-config"
MARK = '"kv_connector_module_path":"kvpool_vllm.entry"'
COMPANIONS = (
    ("--kv-events-config", '{"enable_kv_cache_events":true,"publisher":"null"}'),
    ("--prefix-caching-hash-algo", "sha256_cbor"),
)
"""What the webhook appends behind the transfer flag, unless the user set it."""

PLUGINS, PLUGIN = "VLLM_PLUGINS", "kvpool"

_VERSION = re.compile(r"^__version__(?:: str)? = (?:version = )?[\"']([^\"']+)", re.MULTILINE)


def run(own_file: str) -> None:
    """Called by the injected `sitecustomize`."""
    try:
        _fit_flags(sys.argv)
    except Exception as error:  # noqa: BLE001 the engine starts whatever happens in here
        _say(f"{type(error).__name__}: {error}")
    _run_next(own_file)


def _fit_flags(arguments: list[str]) -> None:
    injected = injected_arguments(arguments)
    if not injected or not (_has_vllm() or _runs_vllm(arguments)):
        return  # a launcher's interpreter: that of the engine which it starts looks for itself
    problem = find_problem(installed_vllm(), sys.version_info[:2]) or _missing_library() or _unfit_allocator()
    if problem:
        _say(f"{problem}: starting without the cache")
        del arguments[injected.start : injected.stop]
        return
    _allow_plugin()


def _allow_plugin() -> None:
    """Where the user names the plugins that vLLM loads, ours is one of them too: it goes with the connector."""
    names = os.environ.get(PLUGINS)
    if names is not None and PLUGIN not in names.split(","):
        os.environ[PLUGINS] = f"{names},{PLUGIN}"


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _runs_vllm(arguments: list[str]) -> bool:
    """Whether the program is vLLM though it is not found yet: `-m` looks in the working folder, which comes on the path later."""
    whole: list[str] = getattr(sys, "orig_argv", [])
    own = whole[1 : len(whole) - len(arguments) + 1]
    return arguments[0] in ("-m", "-c") and any(re.search(r"\bvllm\b", each) for each in own)


def _missing_library() -> str:
    missing = [name for name in ("msgspec", "cbor2") if importlib.util.find_spec(name) is None]
    return f"this vLLM comes without {missing[0]}" if missing else ""


def _unfit_allocator() -> str:
    """The variable may come from the image or a ConfigMap, which the webhook cannot see."""
    variable = find_expandable_segments(os.environ)
    return f"{variable} has expandable_segments, with which vLLM refuses a connector" if variable else ""


def injected_arguments(arguments: list[str]) -> range:
    """The place of the arguments that the webhook appended; empty where there are none."""
    for index, argument in enumerate(arguments[:-1]):
        if argument == TRANSFER_FLAG and MARK in arguments[index + 1]:
            end = index + 2
            while tuple(arguments[end : end + 2]) in COMPANIONS:
                end += 2
            return range(index, end)
    return range(0)


def installed_vllm() -> str:
    """Version of the vLLM that this interpreter would import, without importing it; "" when that cannot be told."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for name in ("_version.py", "version.py", "__init__.py"):
            path = Path(folder) / name
            found = _VERSION.search(path.read_text(errors="replace")) if path.is_file() else None
            if found:
                return found.group(1)
        for path in sorted(Path(folder).parent.glob("vllm*-*.dist-info")):
            return path.name[: -len(".dist-info")].partition("-")[2]
    return ""


def _run_next(own_file: str) -> None:
    """Run the `sitecustomize` that ours stands in front of, as if ours were not there."""
    own_folder = os.path.realpath(os.path.dirname(own_file))  # noqa: PTH120 as the interpreter wrote it
    rest = [entry for entry in sys.path if os.path.realpath(entry or ".") != own_folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _say(text: str) -> None:
    print(f"kvpool: {text}", file=sys.stderr, flush=True)  # noqa: T201 there is no logging yet
