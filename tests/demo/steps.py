"""What `make demo-local` and `make demo` show: the steps, asked of any fleet of two engines, two nodes and a router.

Invariant: a row holds what was measured, and every expectation that was not met.
"""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.demo.references import ANSWER_TOKENS, References
from tests.demo.table import Measured, Row, render
from tests.harness.engine_client import BLOCK_SIZE, Answer, EngineClient, metric_sum

PROMPTS = 3
PROMPT_TOKENS = 3_005
"""No multiple of the block size: an engine's own cache never covers the last token, a tier may."""
KV_CACHE_BYTES = 512 << 20
"""Of each engine: 43,000 tokens of the demo's model, far more than its prompts."""
PATIENCE: dict[str, object] = {"kvpool_prefill_tokens_per_second": 100, "kvpool_verdict_deadline_seconds": 2}
"""What the demo's engines are told. They compute five times as many and more, and a load is given up once it is about to take
0.8 of the time to compute: on a machine that is busy otherwise that is right, and not what the table is to show. A load that is
slow shows in its time to first token all the same."""
PATIENCE_ENVIRONMENT = {name.upper(): str(value) for name, value in PATIENCE.items()}
"""The same for pods."""
LOADED_SHARE = 0.9
SPEEDUP = 3.0


class DemoError(RuntimeError):
    """A step could not be run."""


class FleetNode(Protocol):
    """A node with its agent."""

    @property
    def name(self) -> str:
        """As the router names it."""

    def settle(self) -> None:
        """Wait until every store is done."""


class FleetRouter(Protocol):
    """The router's two sides."""

    @property
    def url(self) -> str:
        """Where clients send requests."""

    def get(self, path: str) -> Any:
        """A GET of the admin API as JSON."""

    def explain(self, body: object) -> Any:
        """Where a completion would go, and why."""


class Fleet(Protocol):
    """Node i stands beside engine i."""

    @property
    def engines(self) -> Sequence[EngineClient]:
        """Two of them."""

    @property
    def nodes(self) -> Sequence[FleetNode]:
        """Two of them."""

    @property
    def router(self) -> FleetRouter:
        """Routes to the engines."""

    def restart_agents(self) -> None:
        """Kill every agent process, keep the holders; ends when the agents serve again."""


def make_text(seed: int, tokens: int) -> str:
    """A random text of as many tokens: the demo's models have one token per character."""
    chosen = random.Random(seed)
    return "".join(chosen.choice(string.ascii_lowercase + "    ") for _ in range(tokens))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Long prompts, their next turns' endings, and short prompts that share nothing with them."""

    long: list[str]
    endings: list[str]
    unrelated: list[str]

    @staticmethod
    def make() -> Prompts:
        """The same at every run."""
        return Prompts(
            [make_text(seed, PROMPT_TOKENS) for seed in range(PROMPTS)],
            [make_text(1_000 + seed, 50) for seed in range(PROMPTS)],
            [make_text(500 + seed, 200) for seed in range(PROMPTS)],
        )


class Demo:
    """The steps. Node and engine of index 0 are `a`, of index 1 `b`."""

    def __init__(self, stack: Fleet, references: References, prompts: Prompts) -> None:
        self._stack = stack
        self._references = references
        self._prompts = prompts.long
        self._unrelated = prompts.unrelated
        self._node_of = {e.endpoint: n.name for e, n in zip(stack.engines, stack.nodes, strict=True)}
        self.rows: list[Row] = []

    def run(self) -> None:
        """All steps, in order."""
        a, b = self._stack.engines
        steps: tuple[tuple[str, Callable[[], list[Measured]]], ...] = (
            ("cold", lambda: self._each(a, self._references.cold)),
            ("ram", lambda: self._each(a, self._references.cached, before=a.reset_own_cache)),
            ("valkey", lambda: self._each(b, self._references.cached)),
            ("restarted", self._restarted),
            ("follow_up", self._follow_up),
            ("unrelated", self._unrelated_while_busy),
        )
        for step, run in steps:
            say(f"step {step}")
            row = Row(step, run())
            self.rows.append(row)
            self._check(row)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _each(
        self, engine: EngineClient, references: list[Answer], *, before: Callable[[], None] = lambda: None
    ) -> list[Measured]:
        before()
        measured = []
        for prompt, reference in zip(self._prompts, references, strict=True):
            measured.append(self._measure(engine, prompt, reference))
        self._settle()
        return measured

    def _restarted(self) -> list[Measured]:
        a, b = self._stack.engines
        self._stack.restart_agents()
        for engine in self._stack.engines:
            engine.wait_identified()
        b.reset_own_cache()  # so that the next turn has one holder on a GPU: a
        return self._each(a, self._references.cached, before=a.reset_own_cache)

    def _follow_up(self) -> list[Measured]:
        b = self._stack.engines[1]
        b.wait_until(lambda: not self._gpu_blocks(b), seconds=10.0, what="b's empty cache seen by the router")
        pairs = zip(self._references.follow_up_prompts, self._references.follow_up, strict=True)
        return [self._measure(None, prompt, reference) for prompt, reference in pairs]

    def _gpu_blocks(self, engine: EngineClient) -> int:
        """Blocks that the router believes to be in an engine's own cache."""
        (endpoint,) = (e for e in self._stack.router.get("/v1/endpoints") if e["endpoint"] == engine.endpoint)
        return sum(known["gpu_blocks"] for known in endpoint["engines"])

    def _unrelated_while_busy(self) -> list[Measured]:
        a = self._stack.engines[0]
        measured = []
        for i, (text, reference) in enumerate(zip(self._unrelated, self._references.unrelated, strict=True)):
            prompt = self._cold_prompt_for(a, first_seed=2_000 + 100 * i)
            with ThreadPoolExecutor(1) as background:
                cold = background.submit(a.complete_timed, prompt, max_tokens=1, url=self._stack.router.url)
                a.wait_until(self._is_busy, seconds=10.0, what="cold prompt running")
                measured.append(self._measure(None, text, reference))
            if routed_endpoint(cold.result().route) != a.endpoint:
                raise DemoError(f"the cold prompt went elsewhere: {cold.result().route}")
        return measured

    def _cold_prompt_for(self, engine: EngineClient, *, first_seed: int) -> str:
        """A prompt that nobody holds and that the router, which spreads such prompts by their hash, gives to `engine`."""
        for seed in range(first_seed, first_seed + 100):
            prompt = make_text(seed, PROMPT_TOKENS)
            if self._stack.router.explain(engine.body(prompt, max_tokens=1))["endpoint"] == engine.endpoint:
                return prompt
        raise DemoError(f"the router gives no cold prompt to {engine.endpoint}")

    def _is_busy(self) -> bool:
        """Whether the router has sent a request to engine a that has not ended."""
        running = {e["endpoint"]: e["running"] for e in self._stack.router.get("/v1/endpoints")}
        return bool(running[self._stack.engines[0].endpoint])

    # --- measuring ------------------------------------------------------------------------------------------------

    def _measure(self, engine: EngineClient | None, prompt: str, reference: Answer) -> Measured:
        """One prompt at an engine, or through the router (None)."""
        before = {e.endpoint: loaded_tokens(e) for e in self._stack.engines}
        url = "" if engine is not None else self._stack.router.url
        timed = (engine or self._stack.engines[0]).complete_timed(prompt, max_tokens=ANSWER_TOKENS, url=url)
        endpoint = engine.endpoint if engine is not None else routed_endpoint(timed.route)
        chosen = next(e for e in self._stack.engines if e.endpoint == endpoint)
        after = loaded_tokens(chosen)
        loaded = {tier: int(after[tier] - before[endpoint][tier]) for tier in after}
        equal = timed.answer == reference
        return Measured(timed.ttft_seconds, timed.prompt_tokens, loaded, self._node_of[endpoint], equal, timed.route)

    def _settle(self) -> None:
        for node in self._stack.nodes:
            node.settle()

    # --- expectations ---------------------------------------------------------------------------------------------

    def _check(self, row: Row) -> None:
        tier = {"ram": "ram", "restarted": "ram", "valkey": "valkey"}.get(row.step)
        whole = PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE
        row.expect(row.answer_equal, "an answer differs from the engine's without the connector")
        enough = LOADED_SHARE * whole
        if tier is not None:
            loaded = all(m.loaded_tokens[tier] >= enough for m in row.measured)
            row.expect(loaded, f"less than {LOADED_SHARE:.0%} of the prompt's whole blocks came from {tier}")
        if row.step == "ram":
            quick = row.ttft_seconds * SPEEDUP <= self.rows[0].ttft_seconds
            row.expect(quick, f"time to first token is more than 1/{SPEEDUP:g} of the cold one")
        if row.step == "follow_up":
            row.expect(row.node == self._stack.nodes[0].name, "the next turn did not go to the holder of its prefix")
            own = all(m.loaded_tokens["gpu"] >= enough for m in row.measured)
            row.expect(own, "the next turn did not find its prefix in the engine's own cache")
        if row.step == "unrelated":
            row.expect(row.node == self._stack.nodes[1].name, "the unrelated prompt did not go to the idle engine")


def loaded_tokens(engine: EngineClient) -> dict[str, float]:
    """Tokens that an engine has taken from its own cache and, by our connector's metrics, from each tier."""
    text = engine.metrics()
    tiers = {tier: metric_sum(text, "kvpool_connector_loaded_tokens_total", tier=tier) for tier in ("ram", "valkey")}
    return {"gpu": metric_sum(text, "vllm:prefix_cache_hits_total"), **tiers}


def routed_endpoint(header: str) -> str:
    """`endpoint=` of x-kvpool-route."""
    fields = dict(part.strip().split("=", 1) for part in header.split(";") if "=" in part)
    return fields.get("endpoint", "")


STARTED = time.monotonic()


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def warm_up(stack: Fleet) -> None:
    """An engine's first long prompt is slower than all later ones: not what this is about."""
    say("engines are ready; one long prompt each to warm up")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda engine: engine.complete(make_text(900, PROMPT_TOKENS), max_tokens=1), stack.engines))
    for engine in stack.engines:
        engine.reset_own_cache()


def report(rows: list[Row], result: Path) -> int:
    """Print the table and write it as JSON to `result`; 0 when every row is as expected."""
    result.write_text(json.dumps({"block_size": BLOCK_SIZE, "steps": [row.as_json() for row in rows]}, indent=1) + "\n")
    print("\n" + render(rows) + "\n")
    for row in rows:
        for problem in row.problems:
            print(f"{row.step}: {problem}")
    return 0 if all(row.ok for row in rows) else 1
