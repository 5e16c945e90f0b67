"""Where scoring sends requests."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_router.config import Scoring
from kvpool_router.prefix_index import TierBlockCount
from kvpool_router.reasons import AFFINITY, LOAD, PREFIX, SINGLE
from kvpool_router.scoring import Candidate, Choice, choose

WEIGHTS = Scoring()
KEY = b"first blocks"
SIZE = 32


def pick(*candidates: Candidate, tokens: int = 3_000, key: bytes | None = KEY) -> Choice:
    return choose(candidates, prompt_tokens=tokens, affinity_key=key, weights=WEIGHTS)


def test_follow_up_goes_to_the_holder_of_its_prefix() -> None:
    holder = Candidate("b", blocks=TierBlockCount(gpu=90), block_tokens=SIZE)
    other = Candidate("a", blocks=TierBlockCount(valkey=90), block_tokens=SIZE)
    choice = pick(other, holder)
    assert (choice.score.target, choice.reason) == ("b", PREFIX)


@pytest.mark.parametrize("rate", [300.0, 4_000.0, 50_000.0])
def test_holder_wins_at_any_prefill_rate(rate: float) -> None:
    holder = Candidate("b", rate, blocks=TierBlockCount(ram=90), block_tokens=SIZE)
    other = Candidate("a", rate, blocks=TierBlockCount(valkey=90), block_tokens=SIZE)
    assert pick(other, holder).score.target == "b"


@pytest.mark.parametrize(("mine", "others"), [(500.0, 700.0), (3_000.0, 5_000.0), (0.0, 700.0)])
def test_noise_in_measured_rates_does_not_move_a_conversation(mine: float, others: float) -> None:
    holder = Candidate("b", mine, blocks=TierBlockCount(gpu=90), block_tokens=SIZE)
    for blocks in (TierBlockCount(ram=90), TierBlockCount(valkey=90), TierBlockCount(gpu=5, ram=85)):
        assert pick(Candidate("a", others, blocks=blocks, block_tokens=SIZE), holder).score.target == "b"


def test_busier_of_two_equal_holders_is_avoided() -> None:
    blocks = TierBlockCount(gpu=90)
    busy = Candidate("a", queued_tokens=100, running=1, blocks=blocks, block_tokens=SIZE)
    assert pick(busy, Candidate("b", blocks=blocks, block_tokens=SIZE)).score.target == "b"


def test_unrelated_prompt_avoids_the_endpoint_with_a_cold_prompt_in_flight() -> None:
    busy = Candidate("a", queued_tokens=3_000, running=1)
    idle = Candidate("b")
    for tokens in (64, 3_000):
        for key in (b"1", b"2", b"3"):
            assert pick(busy, idle, tokens=tokens, key=key).score.target == "b"


def test_busy_holder_keeps_a_follow_up_while_waiting_is_shorter_than_computing() -> None:
    blocks = TierBlockCount(gpu=90)
    assert pick(Candidate("a", queued_tokens=500, blocks=blocks, block_tokens=SIZE), Candidate("b")).score.target == "a"
    assert (
        pick(Candidate("a", queued_tokens=6_000, blocks=blocks, block_tokens=SIZE), Candidate("b")).score.target == "b"
    )


def test_nearer_tiers_win() -> None:
    tiers = [TierBlockCount(valkey=20), TierBlockCount(ram=20), TierBlockCount(gpu=20)]
    candidates = [Candidate(str(i), blocks=blocks, block_tokens=SIZE) for i, blocks in enumerate(tiers)]
    seconds = [score.seconds for score in pick(*candidates).scores]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3


def test_idle_endpoints_without_hits_share_prompts_by_their_first_blocks() -> None:
    candidates = [Candidate(name) for name in "abcd"]
    chosen = Counter(pick(*candidates, key=i.to_bytes(4, "big")).score.target for i in range(2_000))
    assert min(chosen.values()) > 400
    assert pick(*candidates).reason == AFFINITY
    assert pick(*candidates).score == pick(*reversed(candidates)).score


def test_endpoint_that_leaves_moves_only_its_own_share() -> None:
    candidates = [Candidate(name) for name in "abcd"]
    for i in range(200):
        before = pick(*candidates, key=i.to_bytes(4, "big")).score.target
        after = pick(*candidates[:-1], key=i.to_bytes(4, "big")).score.target
        assert before in ("d", after)


def test_without_tokens_the_least_loaded_longest_unused_endpoint_wins() -> None:
    first, second, busy = Candidate("a", order=7), Candidate("b", order=3), Candidate("c", running=2)
    choice = pick(first, second, busy, key=None)
    assert (choice.score.target, choice.reason) == ("b", LOAD)


def test_single_candidate_is_named_so() -> None:
    assert pick(Candidate("a", queued_tokens=10**9)).reason == SINGLE


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        pick()


def test_unmeasured_endpoint_is_judged_by_the_others_rate() -> None:
    scores = pick(Candidate("a", tokens_per_second=100.0), Candidate("b")).scores
    assert scores[0].seconds == scores[1].seconds


def test_shared_start_counts_for_nothing_on_a_hot_endpoint() -> None:
    shared = TierBlockCount(gpu=30)
    hot = Candidate("a", recent=60, blocks=shared, block_tokens=SIZE)
    chosen = Counter(pick(hot, Candidate("b", recent=2), key=bytes([i])).score.target for i in range(100))
    assert 20 < chosen["b"] < 80


def test_hot_endpoint_keeps_its_own_conversations() -> None:
    own = TierBlockCount(gpu=80)
    choice = pick(Candidate("a", recent=60, blocks=own, block_tokens=SIZE), Candidate("b", recent=2))
    assert (choice.score.target, choice.reason) == ("a", PREFIX)


def test_one_shared_first_block_does_not_send_everything_to_one_endpoint() -> None:
    """Best match alone sends every conversation of the Mooncake trace to one worker: all share block 0."""
    source = random.Random(7)
    names = ["a", "b", "c", "d"]
    held: dict[str, set[tuple[int, ...]]] = {name: set() for name in names}
    chosen: Counter[str] = Counter()
    for number in range(600):
        prompt = (0, *(source.randrange(10**9) for _ in range(19)))
        prefixes = [prompt[: i + 1] for i in range(len(prompt))]
        found = {name: sum(prefix in held[name] for prefix in prefixes) for name in names}
        candidates = [Candidate(n, blocks=TierBlockCount(gpu=found[n]), block_tokens=512) for n in names]
        target = pick(*candidates, tokens=20 * 512, key=repr(prompt[:2]).encode()).score.target
        held[target].update(prefixes)
        chosen[target] += 1
        assert number < 50 or max(chosen.values()) < 0.5 * number
    assert min(chosen.values()) > 90


CANDIDATES = st.builds(
    Candidate,
    target=st.text("abcdefgh", min_size=1, max_size=3),
    tokens_per_second=st.floats(0, 1e6),
    queued_tokens=st.floats(0, 1e9),
    running=st.integers(0, 1_000),
    recent=st.floats(0, 1e6),
    blocks=st.builds(TierBlockCount, st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)),
    block_tokens=st.integers(1, 512),
)


@given(
    st.lists(CANDIDATES, min_size=1, max_size=6, unique_by=lambda candidate: candidate.target),
    st.integers(0, 100_000),
    st.one_of(st.none(), st.binary(max_size=8)),
)
def test_every_candidate_gets_a_score_and_the_choice_is_one_of_them(
    candidates: list[Candidate], tokens: int, key: bytes | None
) -> None:
    choice = pick(*candidates, tokens=tokens, key=key)
    assert choice.score in choice.scores
    assert [score.target for score in choice.scores] == [candidate.target for candidate in candidates]
    assert all(0 <= score.left_tokens <= tokens and score.seconds >= 0 for score in choice.scores)
