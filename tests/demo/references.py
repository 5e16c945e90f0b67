"""Answers of an engine without the connector, to hold the demo's rows against.

They are asked once and kept in `.kvpool/demo-reference.json`, named by everything they depend on: engine, model, processor,
prompts. Invariant: an answer is compared only with one computed in the same shape: all of the prompt computed (cold), or its
whole blocks taken from the engine's own prefix cache and the rest computed (cached).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.harness.engine_client import Answer, EngineClient

ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class References:
    """One entry per prompt; `follow_up_prompts` are the prompts' next turns, `unrelated` answers to unrelated prompts."""

    cold: list[Answer]
    cached: list[Answer]
    follow_up_prompts: list[str]
    follow_up: list[Answer]
    unrelated: list[Answer]


def ask(engine: EngineClient, prompts: Sequence[str], endings: Sequence[str], unrelated: Sequence[str]) -> References:
    """Collect all answers. `endings`: what the user says in the next turn, after the answer."""
    references = References([], [], [], [], [])
    for prompt, ending in zip(prompts, endings, strict=True):
        engine.reset_own_cache()
        references.cold.append(engine.complete(prompt, max_tokens=ANSWER_TOKENS))
        engine.reset_own_cache()  # so that the next turn's blocks come from the cached answer, as they will in the demo
        engine.complete(prompt, max_tokens=1)
        answer = engine.complete(prompt, max_tokens=ANSWER_TOKENS)
        references.cached.append(answer)
        next_turn = prompt + "".join(answer.tokens) + ending
        references.follow_up_prompts.append(next_turn)
        references.follow_up.append(engine.complete(next_turn, max_tokens=ANSWER_TOKENS))
    references.unrelated.extend(engine.complete(text, max_tokens=ANSWER_TOKENS) for text in unrelated)
    return references


def key_of(*inputs: object) -> str:
    """A name for everything that the answers depend on; the processor counts, since sums differ between instruction sets."""
    cpu = re.findall(r"^(?:model name|flags)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return hashlib.sha256(repr((inputs, sorted(set(cpu)))).encode()).hexdigest()


def load(path: Path, key: str) -> References | None:
    """What an earlier run asked, if it asked the same."""
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    if kept["key"] != key:
        return None
    answers = {
        name: [Answer(tuple(a["tokens"]), tuple(a["logprobs"])) for a in kept[name]]
        for name in ("cold", "cached", "follow_up", "unrelated")
    }
    return References(follow_up_prompts=kept["follow_up_prompts"], **answers)


def keep(path: Path, key: str, references: References) -> None:
    """For the next run."""
    path.write_text(json.dumps({"key": key, **asdict(references)}) + "\n")
