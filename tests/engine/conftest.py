"""Real engines, agents, Valkey and router, shared by the tests: an engine takes 12 to 30 s of a core to start.

`fleet` serves tiny-llama on two engines with two nodes for the whole session; a test that breaks a part puts it right again.
Tests that need no engine come first, then those of the fleet: meanwhile the fleet's engines start, and behind them those of
single modules. API servers are forked (`tests.harness.engine_forks`); some engines run their worker in the core's process, as on
a GPU, others have workers of their own.
"""

from __future__ import annotations

import itertools
import random
import string
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from pluggy import Result

from tests.harness.engine import ENVIRONMENT, Engine
from tests.harness.engine_client import BLOCK_SIZE
from tests.harness.engine_forks import EngineForks
from tests.harness.node import Node, socket_below
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

OWN_ENGINES = ("strangers_starting", "two_ranks_starting", "hybrid_starting")
"""Fixtures of engines that one module uses, in the order in which the modules run."""
LOG_LINES = 30
"""Of each part, shown with a failed test."""

_seeds = itertools.count(1)
_log_sizes: dict[Path, int] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without an engine first; module by module, as their fixtures live."""

    def turn(path: Path) -> int:
        needed = {name for item in items if item.path == path for name in getattr(item, "fixturenames", ())}
        own = [place for place, name in enumerate(OWN_ENGINES, start=2) if name in needed]
        return max([*own, int("make_engine" in needed)])

    turns = {path: turn(path) for path in {item.path for item in items}}
    items.sort(key=lambda item: turns[item.path])


@pytest.fixture(scope="session", autouse=True)
def _early(request: pytest.FixtureRequest) -> None:
    """Begin with what takes longest, if a test needs it, in the order of the tests."""
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in ("starting", *OWN_ENGINES):
        if name in needed:
            request.getfixturevalue(name)


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
    """Start side by side; ends when all serve."""
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
def forks(parts: Paths, folder: Path) -> Iterator[EngineForks]:
    """What starts engines."""
    forks = EngineForks(parts.engine_python, folder=folder, environment=ENVIRONMENT)
    yield forks
    forks.stop()


@pytest.fixture(scope="session")
def make_engine(parts: Paths, folder: Path, forks: EngineForks) -> Callable[..., Engine]:
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
            forks=forks,
            **more,  # type: ignore[arg-type]
        )

    return make


@pytest.fixture(scope="session")
def start_behind(forks: EngineForks) -> Iterator[Callable[..., Future[None]]]:
    """Starts engines side by side when those before them serve."""
    with ThreadPoolExecutor(1, thread_name_prefix="start-behind") as pool:
        yield lambda *engines: pool.submit(start_engines, *engines)
        pool.shutdown(wait=False, cancel_futures=True)
        forks.stop()  # what is being started ends


@dataclass(frozen=True, slots=True)
class Starting:
    """Engines of one module, being started."""

    engines: tuple[Engine, ...]
    served: Future[None]

    def wait(self) -> tuple[Engine, ...]:
        """Wait until all serve."""
        self.served.result()
        return self.engines

    def kill(self) -> None:
        """End them."""
        for engine in self.engines:
            engine.program.kill()


@pytest.fixture(scope="session")
def starting(
    parts: Paths,
    folder: Path,
    forks: EngineForks,
    make_engine: Callable[..., Engine],
    start_behind: Callable[..., Future[None]],
) -> Iterator[tuple[Stack, Starting]]:
    """Fleet and reference, whose engines are being started side by side."""
    stack = Stack(
        folder / "fleet",
        parts.models["tiny-llama"],
        paths=parts,
        tapped=True,
        lease_seconds=LEASE_SECONDS,
        extra_config=SLOW,
        workers_in_core=(False, True),
        forks=forks,
    )
    engines = (make_engine("reference", "tiny-llama", cores="1", worker_in_core=True), *stack.engines)
    try:
        served = start_behind(*engines)
        stack.start_rest()
        yield stack, Starting(engines, served)
    finally:
        engines[0].program.kill()
        stack.stop()


@pytest.fixture(scope="session")
def strangers_starting(
    starting: tuple[Stack, Starting], make_engine: Callable[..., Engine], start_behind: Callable[..., Future[None]]
) -> Starting:
    """Beside node a: other weights under the same served name, weights that are no files, another hash algorithm."""
    socket = starting[0].nodes[0].socket
    wrong, dummy = ("--prefix-caching-hash-algo", "sha256"), ("--load-format", "dummy")
    engines = (
        make_engine("twin", "tiny-llama-b", socket=socket, worker_in_core=True),
        make_engine("dummy", "tiny-llama", socket=socket, cores="1", worker_in_core=True, arguments=dummy),
        make_engine("wrong", "tiny-llama", socket=socket, arguments=wrong),
    )
    return Starting(engines, start_behind(*engines))


@pytest.fixture(scope="session")
def two_ranks_starting(
    starting: tuple[Stack, Starting], make_engine: Callable[..., Engine], start_behind: Callable[..., Future[None]]
) -> Starting:
    """Engines of two ranks, behind the tap of node a and without the connector."""
    socket = starting[0].taps[0].path
    engines = (
        make_engine("tp2", "tiny-llama", cores="0|1", tensor_parallel=2, socket=socket),
        make_engine("tp2-reference", "tiny-llama", cores="0|1", tensor_parallel=2),
    )
    return Starting(engines, start_behind(*engines))


@pytest.fixture(scope="session")
def hybrid_starting(
    folder: Path, make_engine: Callable[..., Engine], start_behind: Callable[..., Future[None]]
) -> Starting:
    """Engines of a model with sliding windows, beside a node at `folder / "nh"` and without the connector."""
    engines = (
        make_engine("hybrid", "tiny-hybrid", cores="0", socket=socket_below(folder / "nh"), worker_in_core=True),
        make_engine("hybrid-reference", "tiny-hybrid", cores="1", worker_in_core=True),
    )
    return Starting(engines, start_behind(*engines))


@pytest.fixture(scope="session")
def started(starting: tuple[Stack, Starting]) -> tuple[Stack, Engine]:
    """The fleet and its reference, serving."""
    stack, engines = starting
    reference, *_ = engines.wait()
    stack.wait_ready()
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
