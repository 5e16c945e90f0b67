"""`make demo-local`: KV blocks travel between two engines, two agents and a Valkey cluster, and a router follows them.

Invariant: the table shows what was measured; it ends non-zero when any expectation failed, and leaves nothing running.
"""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

from tests.demo import references as reference_answers
from tests.demo.steps import KV_CACHE_BYTES, PATIENCE, Demo, DemoError, Prompts, report, say, warm_up
from tests.harness.engine import ROOT, Engine
from tests.harness.processes import ProgramError
from tests.harness.provision import paths as provisioned
from tests.harness.stack import Stack, clean
from tests.harness.valkey_cluster import free_ports

FOLDER = ROOT / ".kvpool" / "demo"
RESULT = ROOT / ".kvpool" / "demo.json"
REFERENCES = ROOT / ".kvpool" / "demo-reference.json"


def run() -> int:
    """Start everything, run the steps, print and write the table, end everything."""
    parts = provisioned()
    clean(FOLDER)
    model = parts.models["demo-60m"]
    stack = Stack(FOLDER, model, paths=parts, extra_config=PATIENCE, kv_cache_bytes=KV_CACHE_BYTES)
    reference = Engine(
        "reference",
        model,
        paths=parts,
        folder=FOLDER,
        port=free_ports(1)[0],
        cores="1",
        socket=None,
        kv_cache_bytes=KV_CACHE_BYTES,
    )
    prompts = Prompts.make()
    key = reference_answers.key_of(parts.engine_python, model, prompts, reference.arguments)
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
            references = reference_answers.ask(reference, prompts.long, prompts.endings, prompts.unrelated)
            reference_answers.keep(REFERENCES, key, references)
            reference.program.kill()
        stack.wait_ready()
        warm_up(stack)
        demo = Demo(stack, references, prompts)
        try:
            demo.run()
        except (DemoError, ProgramError):
            report(demo.rows, RESULT)
            raise
    finally:
        reference.program.kill()
        stack.stop()
    return report(demo.rows, RESULT)


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
    except (DemoError, ProgramError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 2


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
