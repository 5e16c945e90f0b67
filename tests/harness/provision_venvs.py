"""Makes the two virtual environments: the product's (with all tools) and the engine's (torch and vLLM for CPU).

Both are filled by uv from lock files with hashes; uv itself comes by pip, pinned by the same lock. Invariant: what is in a
venv is decided by its lock file and the Python that made it, which is why both are part of its name in the cache.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.harness.provision_cache import ProvisionError, key_of, make_once
from tests.harness.provision_commands import installer_environment, pip_setting, run_logged, without

ROOT = Path(__file__).resolve().parents[2]
PRODUCT_LOCK = ROOT / "requirements-dev.txt"
ENGINE_LOCK = ROOT / "requirements-engine.txt"

_WARM_UP = """
import ctypes
ctypes.CDLL("libnuma.so.1")
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker
import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
"""


def product_entry(cache: Path) -> Path:
    """Where the product venv of this checkout's lock lies."""
    return cache / f"venv-{_key(PRODUCT_LOCK)}"


def engine_entry(cache: Path) -> Path:
    """Where the engine venv of this checkout's lock lies."""
    return cache / f"engine-{_key(ENGINE_LOCK)}"


def python_of(entry: Path) -> Path:
    """The interpreter of a venv."""
    return entry / "bin" / "python"


def make_product(cache: Path, logs: Path, environment: dict[str, str]) -> None:
    """The product venv: libraries of agent and router, test tools, valkey-server."""
    log = logs / "provision-venv.log"

    def make(entry: Path) -> None:
        _fill(entry, PRODUCT_LOCK, cache=cache, log=log, environment=environment, compiled=True)

    make_once(product_entry(cache), make, what="product venv", hint="seconds")


def make_engine(cache: Path, logs: Path, environment: dict[str, str]) -> None:
    """The engine venv; imported once, which proves that it can be and writes the byte code of what an engine loads."""
    log = logs / "provision-engine.log"

    def make(entry: Path) -> None:
        _fill(entry, ENGINE_LOCK, cache=cache, log=log, environment=environment, compiled=False)
        run_logged(
            [python_of(entry), "-W", "ignore", "-c", _WARM_UP],
            log=log,
            environment=without(environment, "PYTHONDONTWRITEBYTECODE", "PYTHONPATH"),
            what="importing vLLM",
            remedy="If libnuma.so.1 is missing: install the system package libnuma1.",
        )

    make_once(engine_entry(cache), make, what="engine venv", hint="about a minute; downloads 2 GB, takes 5 GB on disk")


def make_installer(cache: Path, logs: Path, environment: dict[str, str]) -> None:
    """uv, in a venv of its own."""
    pinned = _pinned_uv()

    def make(entry: Path) -> None:
        log = logs / "provision-uv.log"
        run_logged(
            [_base_python(), "-m", "venv", "--clear", entry],
            log=log,
            environment=installer_environment(cache, environment),
            what="python3 -m venv",
            remedy="On Debian: apt-get install python3-venv.",
        )
        lock = entry / "uv.txt"
        lock.write_text(pinned)
        run_logged(
            [python_of(entry), "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", lock],
            log=log,
            environment=installer_environment(cache, environment),
            what="installing uv",
            remedy="Are packages reached (a proxy, an index in pip's configuration)?",
        )

    make_once(_installer_entry(cache), make, what="uv", hint="seconds")


def _fill(entry: Path, lock: Path, *, cache: Path, log: Path, environment: dict[str, str], compiled: bool) -> None:
    """A venv with exactly what `lock` names. Cut off in the middle, it goes on from what was downloaded."""
    uv = _installer_entry(cache) / "bin" / "uv"
    environment = installer_environment(cache, environment)
    for setting, variable in (("global.index-url", "UV_DEFAULT_INDEX"), ("global.extra-index-url", "UV_INDEX")):
        if value := pip_setting(python_of(_installer_entry(cache)), setting):
            environment.setdefault(variable, value)
    run_logged(
        [uv, "venv", "--quiet", "--allow-existing", "--python", _base_python(), entry],
        log=log,
        environment=environment,
        what="making a virtual environment",
    )
    compiling = ["--compile-bytecode"] if compiled else []
    run_logged(
        [uv, "pip", "sync", "--require-hashes", *compiling, "--python", python_of(entry), lock],
        log=log,
        environment=environment,
        what=f"installing {lock.name}",
        remedy="Run it again: what was downloaded is kept.",
    )


def _installer_entry(cache: Path) -> Path:
    return cache / f"uv-{key_of(_pinned_uv(), _python_identity())}"


def _pinned_uv() -> str:
    """uv's lines of the product lock: version and hashes."""
    found = re.search(r"^uv==.*(?:\n +--hash=.*)*", PRODUCT_LOCK.read_text(), re.MULTILINE)
    if found is None:
        raise ProvisionError(f"{PRODUCT_LOCK.name} pins no uv: run `make lock`")
    return found.group(0) + "\n"


def _key(lock: Path) -> str:
    return key_of(lock.read_bytes(), Path(__file__).read_bytes(), _python_identity())


def _python_identity() -> str:
    return f"{sys.implementation.cache_tag} {sys.version_info[:3]} {sys.base_prefix}"


def _base_python() -> str:
    """The interpreter behind this one, be it a venv's or not."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)
