"""Real engines, agents, Valkey and router, shared by the tests: an engine takes most of a minute to start.

`fleet` serves tiny-llama on two engines with two nodes for the whole session; a test that breaks a part puts it right again.
Tests that need no engine come first: the fleet's engines start meanwhile.
"""

from __future__ import annotations

import itertools
import random
import string
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from pluggy import Result

from tests.harness.engine import Engine
from tests.harness.engine_client import BLOCK_SIZE
from tests.harness.node import Node
from tests.harness.provision import Paths
from tests.harness.provision import paths as provisioned
from tests.harness.stack import Stack, clean
from tests.harness.valkey_cluster import free_ports

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".kvpool" / "engine-tests"
PROMPT_TOKENS = 20 * BLOCK_SIZE + 13
"""No multiple of the block size, see `tests.demo.local`."""
LEASE_SECONDS = 3.0
SLOW: dict[str, object] = {"kvpool_prefill_tokens_per_second": 100, "kvpool_verdict_deadline_seconds": 2}
"""A tiny model computes a prompt sooner than a busy machine fetches it, and two ranks leave an agent hardly any of two cores:
the tests are about fetching, not about giving up in time."""

LOG_LINES = 30
"""Of each part, shown with a failed test."""

_seeds = itertools.count(1)
_log_sizes: dict[Path, int] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without an engine first; module by module, as their fixtures live."""
    with_engines = {item.path for item in items if "make_engine" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path in with_engines)


@pytest.fixture(scope="session", autouse=True)
def _early(request: pytest.FixtureRequest) -> None:
    """Begin with what takes longest, if a test needs it."""
    if any("starting" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("starting")


def pytest_runtest_setup() -> None:
    """Remember where each part's log ends."""
    _log_sizes.clear()
    _log_sizes.update({log: log.stat().st_size for log in FOLDER.rglob("*.log")})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Result[pytest.TestReport], None]:
    """With a failed test, show what the parts logged meanwhile: CI's machine keeps nothing else."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for log in sorted(FOLDER.rglob("*.log")):
            with log.open("rb") as file:
                file.seek(_log_sizes.get(log, 0))
                lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
            if lines:
                report.sections.append((f"{log.relative_to(FOLDER)}", "\n".join(lines)))


def fresh_prompt(tokens: int = PROMPT_TOKENS) -> str:
    """A random prompt that no test used before; one character is one token."""
    chosen = random.Random(next(_seeds))
    return "".join(chosen.choice(string.ascii_lowercase) for _ in range(tokens))


def wait_for(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Poll until true; fails with `what`. A part that is being restarted refuses connections: not yet."""
    end = time.monotonic() + seconds
    while not _holds(condition):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except OSError:
        return False


def settle(node: Node) -> None:
    """Wait until every store is done."""
    node.settle()


def wait_for_valkey(node: Node) -> None:
    """Wait until a node's agent uses its Valkey."""
    wait_for(
        lambda: node.stats()["valkey"]["state"] == "connected", seconds=20, what=f"{node.name} connected to Valkey"
    )


def start_engines(*engines: Engine) -> None:
    """Start side by side; ends when all serve and those with a connector are identified."""
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.wait_ready()


@pytest.fixture(scope="session")
def parts() -> Paths:
    """Where the provisioned programs and models are."""
    return provisioned()


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """The session's state; what a killed session left is ended first."""
    clean(FOLDER)
    FOLDER.mkdir(parents=True)
    yield FOLDER
    left = clean(FOLDER)
    assert not left, f"left running by their tests: {left}"


@pytest.fixture(scope="session")
def make_engine(parts: Paths, folder: Path) -> Callable[..., Engine]:
    """Makes an engine: name, model, then what `Engine` takes."""

    def make(name: str, model: str, *, cores: str = "0", socket: Path | None = None, **more: object) -> Engine:
        return Engine(
            name,
            parts.models[model],
            paths=parts,
            folder=folder,
            port=free_ports(1)[0],
            cores=cores,
            socket=socket,
            extra_config=SLOW,
            **more,  # type: ignore[arg-type]
        )

    return make


@pytest.fixture(scope="session")
def starting(parts: Paths, folder: Path, make_engine: Callable[..., Engine]) -> Iterator[tuple[Stack, Engine]]:
    """Fleet and reference, whose engines are being started side by side."""
    stack = Stack(
        folder / "fleet",
        parts.models["tiny-llama"],
        paths=parts,
        tapped=True,
        lease_seconds=LEASE_SECONDS,
        extra_config=SLOW,
    )
    reference = make_engine("reference", "tiny-llama", cores="1")
    try:
        reference.start()
        stack.start_engines()
        stack.start_rest()
        yield stack, reference
    finally:
        reference.program.kill()
        stack.stop()


@pytest.fixture(scope="session")
def started(starting: tuple[Stack, Engine]) -> tuple[Stack, Engine]:
    """The same, serving."""
    stack, reference = starting
    stack.wait_ready()
    reference.wait_ready()
    return stack, reference


@pytest.fixture
def fleet(started: tuple[Stack, Engine]) -> Stack:
    """Two engines of tiny-llama, two nodes, Valkey, router; their own caches are empty."""
    stack, _ = started
    for engine in stack.engines:
        engine.reset_own_cache()
    return stack


@pytest.fixture
def reference(started: tuple[Stack, Engine]) -> Engine:
    """tiny-llama without the connector."""
    _, engine = started
    engine.reset_own_cache()
    return engine
