"""Which target a request goes to: the least expected time to first token, affinity where that is close.

Pure: values in, a Choice out. Invariant: every target gets a finite score, and equal inputs give equal choices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvpool_router.config import Scoring
from kvpool_router.prefix_index import NO_BLOCKS, TierBlockCount
from kvpool_router.reasons import AFFINITY, LOAD, PREFIX, SINGLE


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target as scoring sees it.

    tokens_per_second: measured prefill rate, 0 when nothing was measured. queued_tokens: prompt tokens in flight there
    that have not led to an answer yet. running: requests in flight. recent: requests routed there lately, faded.
    order: the smaller, the longer ago it was last chosen.
    """

    target: str
    tokens_per_second: float = 0.0
    queued_tokens: float = 0.0
    running: int = 0
    recent: float = 0.0
    order: int = 0
    blocks: TierBlockCount = NO_BLOCKS
    block_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Score:
    """A candidate's score. `seconds` is the expected time to first token; `left_tokens` are to be prefilled.

    work_seconds: what prefilling those and loading the rest costs at everybody's mean rate, without any queue.
    """

    target: str
    seconds: float
    work_seconds: float
    left_tokens: int
    local_tokens: int
    hot: bool
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen target's score, why it was chosen, and all scores."""

    score: Score
    reason: str
    scores: tuple[Score, ...]


def choose(
    candidates: Sequence[Candidate], *, prompt_tokens: int, affinity_key: bytes | None, weights: Scoring
) -> Choice:
    """The target for a prompt. `affinity_key` stands for the prompt's first blocks; None: by load only.

    Raises ValueError when there is no candidate.
    """
    if not candidates:
        raise ValueError("no candidate to choose from")
    scores = score_all(candidates, prompt_tokens=prompt_tokens, weights=weights)
    if len(scores) == 1:
        return Choice(scores[0], SINGLE, scores)
    orders = {candidate.target: candidate.order for candidate in candidates}
    best = min(scores, key=lambda score: (score.seconds, orders[score.target]))
    if affinity_key is None:
        return Choice(best, LOAD, scores)
    close = _close_to(best, scores, prompt_tokens=prompt_tokens, weights=weights)
    owners = [score for score in close if _is_owner(score, prompt_tokens, weights)]
    if owners:
        return Choice(min(owners, key=lambda score: _owner_key(score, affinity_key)), PREFIX, scores)
    if len(close) > 1:
        return Choice(max(close, key=lambda score: _rendezvous(affinity_key, score.target)), AFFINITY, scores)
    return Choice(best, PREFIX if best.left_tokens < prompt_tokens else LOAD, scores)


def score_all(candidates: Sequence[Candidate], *, prompt_tokens: int, weights: Scoring) -> tuple[Score, ...]:
    """The score of every candidate, in their order."""
    measured = [c.tokens_per_second for c in candidates if c.tokens_per_second > 0]
    default = fmean(measured) if measured else weights.default_tokens_per_second
    hot = _hot_targets(candidates, weights)
    return tuple(
        _score(candidate, default, candidate.target in hot, prompt_tokens, weights) for candidate in candidates
    )


def _score(candidate: Candidate, mean_rate: float, hot: bool, prompt_tokens: int, weights: Scoring) -> Score:
    blocks, size = candidate.blocks, candidate.block_tokens
    local = min((blocks.gpu + blocks.ram) * size, prompt_tokens)
    if hot and local < weights.own_fraction * prompt_tokens:
        blocks = NO_BLOCKS
    left = max(prompt_tokens - blocks.total * size, min(prompt_tokens, 1))
    load_seconds = size * (
        blocks.ram * weights.ram_seconds_per_token + blocks.valkey * weights.valkey_seconds_per_token
    )
    rate = candidate.tokens_per_second or mean_rate
    seconds = (left + candidate.queued_tokens) / rate + load_seconds + candidate.running * weights.running_seconds
    return Score(candidate.target, seconds, left / mean_rate + load_seconds, left, local, hot, rate)


def _hot_targets(candidates: Sequence[Candidate], weights: Scoring) -> frozenset[str]:
    """Targets that lately got far more than the others: a start that many prompts share must not draw all to one."""
    if len(candidates) < 2:
        return frozenset()
    total = sum(candidate.recent for candidate in candidates)
    return frozenset(
        c.target for c in candidates if _is_hot(c.recent, (total - c.recent) / (len(candidates) - 1), weights)
    )


def _is_hot(recent: float, others: float, weights: Scoring) -> bool:
    return recent > weights.hot_ratio * others and recent - others >= weights.hot_requests


def _close_to(best: Score, scores: Sequence[Score], *, prompt_tokens: int, weights: Scoring) -> list[Score]:
    cold_seconds = prompt_tokens / best.tokens_per_second
    limit = best.seconds + max(weights.close_seconds, weights.close_fraction * cold_seconds)
    return [score for score in scores if score.seconds <= limit]


def _owner_key(score: Score, affinity_key: bytes) -> tuple[float, float, int]:
    """Least work first: measured rates are too noisy to send a turn from a GPU that holds it to one that loads it."""
    return round(score.work_seconds, 3), score.seconds, -_rendezvous(affinity_key, score.target)


def _is_owner(score: Score, prompt_tokens: int, weights: Scoring) -> bool:
    return score.local_tokens > 0 and score.local_tokens >= weights.own_fraction * prompt_tokens


def _rendezvous(key: bytes, target: str) -> int:
    """Highest-random-weight hashing: a target that comes or goes moves only its own share of the prompts."""
    return int.from_bytes(hashlib.blake2b(key + target.encode(), digest_size=8).digest(), "big")
