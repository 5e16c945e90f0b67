"""`make demo-local`: KV blocks travel between two engines, two agents and a Valkey cluster, and a router follows them.

Invariant: the table shows what was measured; it ends non-zero when any expectation failed, and leaves nothing running.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import string
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

from tests.demo import references as reference_answers
from tests.demo.references import ANSWER_TOKENS, References
from tests.demo.table import Measured, Row, render
from tests.harness.engine import BLOCK_SIZE, ROOT, Answer, Engine, metric_sum
from tests.harness.processes import ProgramError
from tests.harness.provision import paths as provisioned
from tests.harness.stack import Stack, clean
from tests.harness.valkey_cluster import free_ports

FOLDER = ROOT / ".kvpool" / "demo"
RESULT = ROOT / ".kvpool" / "demo.json"
REFERENCES = ROOT / ".kvpool" / "demo-reference.json"
PROMPTS = 3
PROMPT_TOKENS = 3_005
"""No multiple of the block size: an engine's own cache never covers the last token, a tier may."""
LOADED_SHARE = 0.9
SPEEDUP = 3.0


def make_text(seed: int, tokens: int) -> str:
    """A random text of as many tokens: the demo's models have one token per character."""
    chosen = random.Random(seed)
    return "".join(chosen.choice(string.ascii_lowercase + "    ") for _ in range(tokens))


class Demo:
    """The steps. Node and engine of index 0 are `a`, of index 1 `b`."""

    def __init__(self, stack: Stack, references: References, prompts: list[str], unrelated: list[str]) -> None:
        self._stack = stack
        self._references = references
        self._prompts = prompts
        self._unrelated = unrelated
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
        self, engine: Engine, references: list[Answer], *, before: Callable[[], None] = lambda: None
    ) -> list[Measured]:
        before()
        measured = []
        for prompt, reference in zip(self._prompts, references, strict=True):
            measured.append(self._measure(engine, prompt, reference))
        self._settle()
        return measured

    def _restarted(self) -> list[Measured]:
        a, b = self._stack.engines
        for node in self._stack.nodes:
            node.agent.kill()
        for node in self._stack.nodes:
            node.agent.start()
        for node, engine in zip(self._stack.nodes, self._stack.engines, strict=True):
            node.wait_ready()
            engine.wait_identified()
        b.reset_own_cache()  # so that the next turn has one holder on a GPU: a
        return self._each(a, self._references.cached, before=a.reset_own_cache)

    def _follow_up(self) -> list[Measured]:
        b = self._stack.engines[1]
        b.program.wait_until(lambda: not self._gpu_blocks(b), seconds=10.0, what="b's empty cache seen by the router")
        pairs = zip(self._references.follow_up_prompts, self._references.follow_up, strict=True)
        return [self._measure(None, prompt, reference) for prompt, reference in pairs]

    def _gpu_blocks(self, engine: Engine) -> int:
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
                a.program.wait_until(self._is_busy, seconds=10.0, what="cold prompt running")
                measured.append(self._measure(None, text, reference))
            if routed_endpoint(cold.result().route) != a.endpoint:
                raise ProgramError(f"the cold prompt went elsewhere: {cold.result().route}")
        return measured

    def _cold_prompt_for(self, engine: Engine, *, first_seed: int) -> str:
        """A prompt that nobody holds and that the router, which spreads such prompts by their hash, gives to `engine`."""
        for seed in range(first_seed, first_seed + 100):
            prompt = make_text(seed, PROMPT_TOKENS)
            if self._stack.router.explain(engine.body(prompt, max_tokens=1))["endpoint"] == engine.endpoint:
                return prompt
        raise ProgramError(f"the router gives no cold prompt to {engine.endpoint}")

    def _is_busy(self) -> bool:
        """Whether the router has sent a request to engine a that has not ended."""
        running = {e["endpoint"]: e["running"] for e in self._stack.router.get("/v1/endpoints")}
        return bool(running[self._stack.engines[0].endpoint])

    # --- measuring ------------------------------------------------------------------------------------------------

    def _measure(self, engine: Engine | None, prompt: str, reference: Answer) -> Measured:
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
            row.expect(row.node == "node-a", "the next turn did not go to the holder of its prefix")
            own = all(m.loaded_tokens["gpu"] >= enough for m in row.measured)
            row.expect(own, "the next turn did not find its prefix in the engine's own cache")
        if row.step == "unrelated":
            row.expect(row.node == "node-b", "the unrelated prompt did not go to the idle engine")


def loaded_tokens(engine: Engine) -> dict[str, float]:
    """Tokens that an engine has taken from its own cache and, by our connector's metrics, from each tier."""
    text = engine.metrics()
    tiers = {tier: metric_sum(text, "kvpool_connector_loaded_tokens_total", tier=tier) for tier in ("ram", "valkey")}
    return {"gpu": metric_sum(text, "vllm:prefix_cache_hits_total"), **tiers}


def routed_endpoint(header: str) -> str:
    """`endpoint=` of x-kvpool-route."""
    fields = dict(part.strip().split("=", 1) for part in header.split(";") if "=" in part)
    return fields.get("endpoint", "")


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


STARTED = time.monotonic()


def run() -> int:
    """Start everything, run the steps, print and write the table, end everything."""
    parts = provisioned()
    clean(FOLDER)
    model = parts.models["demo-60m"]
    stack = Stack(FOLDER, model, paths=parts)
    reference = Engine("reference", model, paths=parts, folder=FOLDER, port=free_ports(1)[0], cores="1", socket=None)
    prompts = [make_text(seed, PROMPT_TOKENS) for seed in range(PROMPTS)]
    endings = [make_text(1_000 + seed, 50) for seed in range(PROMPTS)]
    unrelated = [make_text(500 + seed, 200) for seed in range(PROMPTS)]
    key = reference_answers.key_of(parts.engine_python, model, prompts, endings, unrelated, reference.arguments)
    references = reference_answers.load(REFERENCES, key)
    try:
        say("starting two engines, two nodes (holder and agent each), three Valkey shards and the router")
        stack.start_engines()
        if references is None:
            say("starting a reference engine without the connector (its answers are kept for later runs)")
            reference.start()
        stack.start_rest()
        if references is None:
            reference.wait_ready()
            say("asking the reference engine")
            references = reference_answers.ask(reference, prompts, endings, unrelated)
            reference_answers.keep(REFERENCES, key, references)
            reference.program.kill()
        stack.wait_ready()
        warm_up(stack)
        demo = Demo(stack, references, prompts, unrelated)
        try:
            demo.run()
        except ProgramError:
            report(demo.rows)
            raise
    finally:
        reference.program.kill()
        stack.stop()
    return report(demo.rows)


def warm_up(stack: Stack) -> None:
    """An engine's first long prompt is slower than all later ones: not what this is about."""
    say("engines are ready; one long prompt each to warm up")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda engine: engine.complete(make_text(900, PROMPT_TOKENS), max_tokens=1), stack.engines))
    for engine in stack.engines:
        engine.reset_own_cache()


def report(rows: list[Row]) -> int:
    """Print the table and write `.kvpool/demo.json`; 0 when every row is as expected."""
    RESULT.write_text(json.dumps({"block_size": BLOCK_SIZE, "steps": [row.as_json() for row in rows]}, indent=1) + "\n")
    print("\n" + render(rows) + "\n")
    for row in rows:
        for problem in row.problems:
            print(f"{row.step}: {problem}")
    return 0 if all(row.ok for row in rows) else 1


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--down", action="store_true", help="end what an interrupted demo left running")
    if parser.parse_args().down:
        print(f"{len(clean(FOLDER))} programs ended")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        return run()
    except ProgramError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 2


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
